"""A command that was started in a sandbox: its streams, its end, and its captured output."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, Self, TypeVar

from snapshotter.api.cancelling import Cancellation
from snapshotter.api.options import Stream
from snapshotter.errors import CommandFailedError, CommandTimeoutError, InvalidInputError
from snapshotter.service.sandbox_link import RunReports

KILL_TIMEOUT_S = 10.0
"""How long a killed command is waited for; one that hangs in the kernel may take longer."""

READ_BYTES = 1 << 16
_TOLD_BYTES = 2000


Output = TypeVar("Output", bytes, str)


@dataclass(frozen=True, slots=True)
class Completed(Generic[Output]):
    """A command that has ended. ``exit_status`` is 128+n when signal n ended it.

    ``stdout`` and ``stderr`` are what it wrote to pipes, else empty.
    """

    arguments: Sequence[str]
    exit_status: int
    stdout: Output
    stderr: Output


def check_status(done: Completed[bytes]) -> None:
    """Raises CommandFailedError, with the end of stderr, unless the exit status is 0."""
    if done.exit_status:
        said = done.stderr[-_TOLD_BYTES:].decode(errors="replace").strip()
        raise CommandFailedError(
            f"run {done.arguments[0]}: exit status {done.exit_status}"
            + (f": {said}" if said else ""),
            exit_status=done.exit_status,
            stdout=done.stdout,
            stderr=done.stderr,
        )


def as_text(done: Completed[bytes]) -> Completed[str]:
    """The output as UTF-8; bytes that are none become U+FFFD."""
    stdout, stderr = (raw.decode(errors="replace") for raw in (done.stdout, done.stderr))
    return Completed(done.arguments, done.exit_status, stdout, stderr)


class Streams:
    """Descriptors of a command's stdin, stdout and stderr: its ends and, of pipes, ours.

    A context manager that closes what nobody took.
    """

    def __init__(self, stdin: Stream, stdout: Stream, stderr: Stream | Literal["stdout"]) -> None:
        self._opened: list[int] = []
        self._ours: list[int | None] = []
        theirs: list[int] = []
        try:
            for number, stream in enumerate((stdin, stdout)):
                theirs.append(self._open(number, stream))
            theirs.append(self._open(2, theirs[1] if stderr == "stdout" else stderr))
        except BaseException:
            self._close()
            raise
        self.theirs = (theirs[0], theirs[1], theirs[2])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def take(self) -> tuple[int | None, int | None, int | None]:
        """Our ends, from now on the caller's."""
        stdin, stdout, stderr = self._ours
        self._ours = []
        return stdin, stdout, stderr

    def _open(self, number: int, stream: Stream) -> int:
        ours: int | None = None
        if stream == "pipe":
            readable, writable = os.pipe()
            theirs, ours = (readable, writable) if number == 0 else (writable, readable)
            self._opened.append(theirs)
        elif stream == "null":
            theirs = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            self._opened.append(theirs)
        elif stream == "inherit":
            theirs = number
        elif isinstance(stream, str):
            raise InvalidInputError(f"stream {stream!r}: write pipe, null or inherit, or give one")
        else:
            theirs = stream if isinstance(stream, int) else stream.fileno()
        self._ours.append(ours)
        return theirs

    def _close(self) -> None:
        for descriptor in (*self._opened, *self._ours):
            if descriptor is not None:
                os.close(descriptor)
        self._opened, self._ours = [], []


@dataclass(slots=True)
class Command:
    """A command that was started; not thread-safe. ``streams`` are our ends, for its user."""

    arguments: Sequence[str]
    reports: RunReports
    streams: tuple[int | None, int | None, int | None]

    @property
    def pid(self) -> int:
        """The command's pid on the host, of one that was decided to be there."""
        assert self.reports.pid is not None
        return self.reports.pid

    def wait_decided(self) -> None:
        """Waits until the command is there; raises as ``check_started`` does."""
        while not self.reports.is_decided:
            self.reports.wait()
        self.check_started()

    def check_started(self) -> None:
        """Raises SandboxError for a command that never was there.

        A program that cannot be executed is always told by the command's end, though it may be
        known by now.
        """
        if self.reports.failure is not None and self.reports.pid is None:
            raise self.reports.failure

    def wait_end(self, timeout_s: float | None = None) -> bool:
        """Waits for the end of the command and all it started; False when that did not come."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self.reports.status is None:
            left = None if deadline is None else deadline - time.monotonic()
            if not self.reports.wait(left):
                return False
        return True

    def exit_status(self) -> int:
        """The status of a command that has ended. Raises SandboxError if it could not be run."""
        if self.reports.failure is not None:
            raise self.reports.failure
        assert self.reports.status is not None
        return self.reports.status

    def kill(self) -> None:
        """Ends the command and all it started, and waits until that is done."""
        if self.reports.status is None:
            self.reports.kill()
            self.wait_end(KILL_TIMEOUT_S)


@dataclass(slots=True)
class Capture:
    """The output of a command as it comes, and what is still to be written to it."""

    command: Command
    to_write: memoryview
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    _open: dict[int, bytearray | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        stdin, stdout, stderr = self.command.streams
        if stdin is not None:
            os.set_blocking(stdin, False)
        pairs = ((stdin, None), (stdout, self.stdout), (stderr, self.stderr))
        self._open = {each: buffer for each, buffer in pairs if each is not None}

    def readable(self) -> list[int]:
        """Descriptors that output may still come from."""
        return [each for each, buffer in self._open.items() if buffer is not None]

    def writable(self) -> list[int]:
        """The descriptor that input goes to, until it was all written."""
        return [each for each, buffer in self._open.items() if buffer is None]

    def move(self, descriptor: int) -> bool:
        """Reads from, or writes to, a descriptor that is ready; False when it is done with."""
        buffer = self._open[descriptor]
        if buffer is None:
            return self._write(descriptor)
        data = os.read(descriptor, READ_BYTES)
        buffer += data
        if not data:
            self._finish(descriptor)
        return bool(data)

    def finish(self) -> None:
        """After the end: takes what is left in the pipes, which nobody of the command holds."""
        for descriptor in self.writable():
            self._finish(descriptor)
        for descriptor in self.readable():
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            while poll.poll(0) and self.move(descriptor):
                pass

    def result(self, timeout_s: float | None = None) -> Completed[bytes]:
        """What came of it. ``timeout_s`` is given for a command that was killed for it.

        Raises SandboxError or CommandTimeoutError.
        """
        if timeout_s is not None:
            raise CommandTimeoutError(
                f"run {self.command.arguments[0]}: killed after {timeout_s:g} s",
                stdout=bytes(self.stdout),
                stderr=bytes(self.stderr),
            )
        status = self.command.exit_status()
        return Completed(self.command.arguments, status, bytes(self.stdout), bytes(self.stderr))

    def abandon(self) -> None:
        """Closes everything; a command that still runs is killed, but not waited for."""
        self.command.reports.close()
        for descriptor in list(self._open):
            self._finish(descriptor)

    def _write(self, descriptor: int) -> bool:
        try:
            self.to_write = self.to_write[os.write(descriptor, self.to_write) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            self.to_write = memoryview(b"")  # it does not want more
        if not self.to_write:
            self._finish(descriptor)
        return bool(self.to_write)

    def _finish(self, descriptor: int) -> None:
        del self._open[descriptor]
        os.close(descriptor)


def capture(
    command: Command, to_write: bytes, timeout_s: float | None, cancellation: Cancellation
) -> Completed[bytes]:
    """Runs a command to its end, killed after ``timeout_s`` or when cancelled; blocks.

    Raises as ``Capture.result`` does, and UnavailableError when it was cancelled.
    """
    work = Capture(command, memoryview(to_write))
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        with cancellation.ended_by(command.reports.kill):
            is_late = not _move_all(work, deadline)
        cancellation.check()
        if is_late:
            command.kill()
        work.finish()
        return work.result(timeout_s if is_late else None)
    finally:
        try:
            command.kill()
        finally:
            work.abandon()


def _move_all(work: Capture, deadline: float | None) -> bool:
    """Moves data until the command's end; False when the deadline came first."""
    reports = work.command.reports
    while reports.status is None:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return False
        poll = select.poll()
        for descriptor in (reports.fileno(), *work.readable()):
            poll.register(descriptor, select.POLLIN)
        for descriptor in work.writable():
            poll.register(descriptor, select.POLLOUT)
        for descriptor, _ in poll.poll(None if left is None else left * 1000):
            if descriptor == reports.fileno():
                reports.read()
            else:
                work.move(descriptor)
    return True
