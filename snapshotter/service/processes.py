"""The daemon's processes: started when missing, adopted when they live, started again when dead.

They run in sessions of their own with logs in the run directory, so that the end of the daemon
is not theirs. A ``Supervisor`` looks after one of them on the daemon's trio loop.
"""

from __future__ import annotations

import os
import signal
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
_END_PATIENCE_S = 5.0
_LOG_TAIL_LINES = 5
_LOG_TAIL_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class Program:
    """A process of ours. ``find`` tells the pid of the one that answers, or None; it may block."""

    name: str
    arguments: Sequence[str]
    log: Path
    find: Callable[[], int | None]


def spawn(program: Program, *, stdin: int | None = None) -> int:
    """Starts a program: ``python -P -m`` its arguments, with this very package to import; its pid.

    It is a child until this process ends, and outlives it. It gets the descriptor ``stdin`` as its
    standard input.
    """
    source = str(Path(snapshotter.__file__).parents[1])
    search = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    taken: tuple[tuple[int, int, int] | tuple[int, int, str, int, int], ...]
    if stdin is None:
        taken = ((os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),)
    else:
        taken = ((os.POSIX_SPAWN_DUP2, stdin, 0),)
    log = os.open(program.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        return os.posix_spawn(
            sys.executable,
            [sys.executable, "-P", "-m", *program.arguments],
            {**os.environ, "PYTHONPATH": search},
            file_actions=(
                *taken,
                (os.POSIX_SPAWN_DUP2, log, 1),
                (os.POSIX_SPAWN_DUP2, log, 2),
            ),
            setsid=True,
        )
    finally:
        os.close(log)


def exit_status(child: int) -> int | None:
    """The exit status of a child (negative: a signal), which is then gone; None while it lives."""
    pid, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else None


def log_tail(path: Path, offset: int = 0) -> str:
    """The last lines that a log got since it was ``offset`` bytes long, for an error message."""
    with path.open("rb") as file:
        file.seek(max(offset, file.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
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


async def end_process(pid: int, patience_s: float = _END_PATIENCE_S) -> None:
    """Ends a process: SIGTERM, and SIGKILL when it does not follow in time."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return
        with trio.move_on_after(patience_s):
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
        self.starting_pid: int | None = None
        """A process that was started and does not answer yet."""
        self.is_started_here = False
        """Whether this supervisor started it, at least once, rather than found it living."""
        self._before = before
        self._up = trio.Event()
        self._has_tried = trio.Event()
        self.trouble = "it has not started yet"
        """Why it is not up, for people."""

    async def run(self) -> None:
        """Looks after the program until cancelled; the program then goes on."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            began = trio.current_time()
            try:
                await self._before()
                child = await self._bring_up()
            except (SnapshotterError, OSError) as error:
                self.trouble = str(error)
                _log.error("process did not start", name=self.program.name, error=str(error))
                self._has_tried.set()
            else:
                self._has_tried.set()
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
            f"{self.program.name} is not up: {self.trouble}; see {self.program.log}"
        )

    async def wait_until_tried(self) -> None:
        """Returns when the first start or adoption has succeeded or failed."""
        await self._has_tried.wait()

    async def _bring_up(self) -> int | None:
        """Adopts what answers (None), or starts it and waits until it answers (its pid)."""
        self.pid = await trio.to_thread.run_sync(self.program.find)
        if self.pid is not None:
            _log.info("process adopted", name=self.program.name, pid=self.pid)
            self._up.set()
            return None
        await trio.lowlevel.checkpoint_if_cancelled()  # the thread's end was not a checkpoint
        log = self.program.log
        logged = log.stat().st_size if log.exists() else 0
        child = self.starting_pid = spawn(self.program)
        self.is_started_here = True
        status = None
        with trio.move_on_after(START_DEADLINE_S):
            while (status := exit_status(child)) is None:
                self.pid = await trio.to_thread.run_sync(self.program.find)
                if self.pid is not None:
                    _log.info("process started", name=self.program.name, pid=self.pid)
                    self.starting_pid = None
                    self._up.set()
                    return child
                await trio.sleep(_START_POLL_S)
        self.starting_pid = None
        tail = log_tail(log, logged)
        if status is not None:
            raise UnavailableError(f"it ended at its start (status {status}): {tail}")
        os.kill(child, signal.SIGKILL)
        await wait_for_end(child)
        exit_status(child)
        raise UnavailableError(f"it did not answer within {START_DEADLINE_S:g} s: {tail}")

    async def _watch(self, child: int | None) -> None:
        assert self.pid is not None
        try:
            await wait_for_end(self.pid)
        finally:
            ended, self.pid, self._up = self.pid, None, trio.Event()
        status = exit_status(child) if child is not None else None
        self.trouble = f"process {ended} ended (status {status})"
        _log.warning("process ended", name=self.program.name, pid=ended, status=status)
