"""Starts the daemon when it is not running, and waits until it has ended.

Two commands at the same moment start one daemon: the start happens under a lock in the run
directory.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import stat
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from snapshotter.errors import AccessDeniedError, UnavailableError
from snapshotter.paths import Paths
from snapshotter.service.control_client import ControlClient

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0
_POLL_S = 0.01
_LOG_TAIL_LINES = 12
_LOG_TAIL_BYTES = 16_384


def connect_or_start(
    paths: Paths, *, config: Path | None = None, command: tuple[str, ...] | None = None
) -> ControlClient:
    """A connection to the daemon of ``paths``, which is started first when nobody answers.

    ``command`` replaces the daemon's own command line. Raises UnavailableError, with the last
    lines of the log, when the daemon ends or is silent for START_TIMEOUT_S, and AccessDeniedError
    when the run directory belongs to someone else.
    """
    try:
        return ControlClient(paths.control_socket)
    except UnavailableError:
        pass
    make_run_directory(paths.run)
    lock = os.open(paths.run / "start.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return ControlClient(paths.control_socket)
        except UnavailableError:
            return _start(paths, command or daemon_command(paths, config))
    finally:
        os.close(lock)


def daemon_command(paths: Paths, config: Path | None) -> tuple[str, ...]:
    """The command line of the daemon of ``paths``."""
    module = (sys.executable, "-P", "-m", "snapshotter.service.daemon")
    where = ("--root", str(paths.root), "--run", str(paths.run))
    settings = () if config is None else ("--config", str(config.absolute()))
    return (*module, *where, *settings)


def wait_for_end(pid: int, *, timeout_s: float = STOP_TIMEOUT_S) -> bool:
    """Waits until a process (not a child of ours) has ended; False when it lives on."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        readable, _, _ = select.select([descriptor], [], [], timeout_s)
        return bool(readable)
    finally:
        os.close(descriptor)


def make_run_directory(run: Path) -> None:
    """Makes the run directory, for us alone; the sockets in it are trusted by us.

    Raises AccessDeniedError when it belongs to someone else or cannot be made.
    """
    try:
        run.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = run.stat(follow_symlinks=False)
    except OSError as error:
        raise AccessDeniedError(
            f"make the run directory {run}: {error.strerror}; name another with --run or --root"
        ) from error
    if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
        raise AccessDeniedError(
            f"use the run directory {run}: it is not a directory of this user; "
            "name another with --run or --root"
        )


def _start(paths: Paths, command: tuple[str, ...]) -> ControlClient:
    log = paths.log("daemon")
    log_offset = log.stat().st_size if log.exists() else 0
    pid = spawn(command, log)
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        try:
            return ControlClient(paths.control_socket)
        except UnavailableError as error:
            if ended:
                code = os.waitstatus_to_exitcode(status)
                raise UnavailableError(
                    f"start the daemon: it ended with status {code}{_tail(log, log_offset)}"
                ) from error
        time.sleep(_POLL_S)
    raise UnavailableError(
        f"start the daemon: process {pid} does not answer on {paths.control_socket} "
        f"after {START_TIMEOUT_S:.0f} s{_tail(log, log_offset)}"
    )


def spawn(command: tuple[str, ...], log: Path, *, passed: Sequence[int] = ()) -> int:
    """Starts ``command`` in a session of its own, its output appended to ``log``; its pid.

    ``passed`` are descriptors that it has as 3, 4, … Signals are as at the start of a session:
    none blocked, none ignored. Raises UnavailableError when it cannot be started.
    """
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    beyond = 3 + len(passed)  # out of the way of the numbers that are given out
    copies = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, beyond) for each in (output, *passed)]
    try:
        return os.posix_spawn(
            command[0],
            command,
            _environment(),
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                *((os.POSIX_SPAWN_DUP2, copies[0], number) for number in (1, 2)),
                *((os.POSIX_SPAWN_DUP2, copy, 3 + i) for i, copy in enumerate(copies[1:])),
            ],
            setsid=True,
            setsigmask=(),
            setsigdef=(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM),
        )
    except OSError as error:
        raise UnavailableError(f"start {command[-1]}: run {command[0]}: {error}") from error
    finally:
        for descriptor in (output, *copies):
            os.close(descriptor)


def _environment() -> dict[str, str]:
    """Ours, and the directory of this package: the daemon is of the same code as its starter."""
    package_root = str(Path(__file__).parents[2])
    search = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([package_root, *filter(None, search)])}


def _tail(log: Path, offset: int) -> str:
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(offset, size - _LOG_TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
    said = "".join(f"\n  {line}" for line in lines) or " (it is empty)"
    return f"; the end of {log}:{said}"
