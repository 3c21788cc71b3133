"""The daemon's processes: started when missing, adopted when they live, started again when dead.

They run in sessions of their own with logs in the run directory, so that the end of the daemon
is not theirs. A ``Supervisor`` looks after one of them on the daemon's trio loop.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog
import trio

import snapshotter
from snapshotter.errors import SnapshotterError, UnavailableError

_log = structlog.get_logger()
START_DEADLINE_S = 20.0
_START_POLL_S = 0.01
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 5.0
_STABLE_S = 30.0
_END_DEADLINE_S = 5.0
_LOG_TAIL_LINES = 5


@dataclass(frozen=True, slots=True)
class Program:
    """A process of ours. ``find`` tells the pid of the one that answers, or None; it may block."""

    name: str
    arguments: Sequence[str]
    log: Path
    find: Callable[[], int | None]


def spawn(program: Program) -> subprocess.Popen[bytes]:
    """Starts a program: ``python -m`` its arguments, with this very package to import."""
    source = str(Path(snapshotter.__file__).parents[1])
    search = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    with program.log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", *program.arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env={**os.environ, "PYTHONPATH": search},
            start_new_session=True,
        )


def log_tail(path: Path) -> str:
    """The last lines of a log, for an error message."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return "(no log)"
    return " | ".join(lines[-_LOG_TAIL_LINES:]) or "(its log is empty)"


async def wait_for_end(pid: int) -> None:
    """Returns when the process, which need not be a child, has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        await trio.lowlevel.wait_readable(descriptor)
    finally:
        os.close(descriptor)


async def end_process(pid: int) -> None:
    """Ends a process: SIGTERM, and SIGKILL when it does not follow in 5 s."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return
        with trio.move_on_after(_END_DEADLINE_S):
            await wait_for_end(pid)
            return


async def _nothing() -> None:
    return


class Supervisor:
    """Keeps one program running. ``before`` is awaited before each start or adoption."""

    def __init__(
        self, program: Program, *, before: Callable[[], Awaitable[None]] = _nothing
    ) -> None:
        self.program = program
        self.pid: int | None = None
        self.is_ours = False
        """Whether this daemon started it."""
        self._before = before
        self._up = trio.Event()
        self._trouble = "it has not started yet"

    async def run(self) -> None:
        """Looks after the program until cancelled; the program then goes on."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            began = trio.current_time()
            try:
                await self._before()
                child = await self._bring_up()
            except (SnapshotterError, OSError) as error:
                self._trouble = str(error)
                _log.error("process did not start", name=self.program.name, error=str(error))
            else:
                await self._watch(child)
            backoff_s = _FIRST_BACKOFF_S if trio.current_time() - began > _STABLE_S else backoff_s
            await trio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, _MAX_BACKOFF_S)

    async def wait_until_up(self, deadline_s: float = START_DEADLINE_S) -> None:
        """Returns when the program answers; UnavailableError with the reason if it does not."""
        with trio.move_on_after(deadline_s):
            await self._up.wait()
            return
        raise UnavailableError(
            f"{self.program.name} is not up: {self._trouble}; see {self.program.log}"
        )

    async def _bring_up(self) -> subprocess.Popen[bytes] | None:
        """Adopts the program that answers, or starts it and waits until it does."""
        self.pid = await trio.to_thread.run_sync(self.program.find)
        if self.pid is not None:
            _log.info("process adopted", name=self.program.name, pid=self.pid)
            self._up.set()
            return None
        child = spawn(self.program)
        self.is_ours = True
        with trio.move_on_after(START_DEADLINE_S):
            while child.poll() is None:
                self.pid = await trio.to_thread.run_sync(self.program.find)
                if self.pid is not None:
                    _log.info("process started", name=self.program.name, pid=self.pid)
                    self._up.set()
                    return child
                await trio.sleep(_START_POLL_S)
        tail = log_tail(self.program.log)
        if child.poll() is not None:
            raise UnavailableError(f"it ended at its start (status {child.returncode}): {tail}")
        child.kill()
        await trio.to_thread.run_sync(child.wait)
        raise UnavailableError(f"it did not answer within {START_DEADLINE_S:g} s: {tail}")

    async def _watch(self, child: subprocess.Popen[bytes] | None) -> None:
        assert self.pid is not None
        try:
            await wait_for_end(self.pid)
        finally:
            ended, self.pid, self._up = self.pid, None, trio.Event()
            status = child.poll() if child is not None else None
        self._trouble = f"process {ended} ended (status {status})"
        _log.warning("process ended", name=self.program.name, pid=ended, status=status)
