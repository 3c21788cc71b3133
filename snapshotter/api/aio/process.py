"""A command that was started in a sandbox, for asyncio and trio."""

from __future__ import annotations

import os
from typing import Self

import anyio
import anyio.abc

from snapshotter.api.command import KILL_TIMEOUT_S, READ_BYTES, Command


class Output(anyio.abc.ByteReceiveStream):
    """What a command writes to stdout or stderr. ``async for`` gives it as it comes."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    async def receive(self, max_bytes: int = READ_BYTES) -> bytes:
        """The next bytes; raises anyio.EndOfStream once nobody can write any more."""
        descriptor = self._open()
        await anyio.wait_readable(descriptor)
        data = os.read(descriptor, max_bytes)
        if not data:
            raise anyio.EndOfStream
        return data

    async def aclose(self) -> None:
        """Closes the pipe: the command gets SIGPIPE when it writes more."""
        self.close()

    def close(self) -> None:
        """The same, at once."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            anyio.notify_closing(descriptor)
            os.close(descriptor)

    def _open(self) -> int:
        if self._descriptor is None:
            raise anyio.ClosedResourceError
        return self._descriptor


class Input(anyio.abc.ByteSendStream):
    """What a command reads from stdin."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor: int | None = descriptor

    async def send(self, item: bytes) -> None:
        """Writes all bytes; raises anyio.BrokenResourceError when the command reads no more."""
        if self._descriptor is None:
            raise anyio.ClosedResourceError
        left = memoryview(item)
        while left:
            await anyio.wait_writable(self._descriptor)
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:
                continue  # less room than it takes
            except BrokenPipeError as error:
                raise anyio.BrokenResourceError from error

    async def aclose(self) -> None:
        """Ends the command's input."""
        self.close()

    def close(self) -> None:
        """The same, at once."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            anyio.notify_closing(descriptor)
            os.close(descriptor)


class Process:
    """A command that was started in a sandbox. Leaving its ``async with`` block kills it.

    ``stdin``, ``stdout`` and ``stderr`` are byte streams where pipes were asked for, else None.
    """

    def __init__(self, command: Command) -> None:
        self._command = command
        stdin, stdout, stderr = command.streams
        self.stdin = None if stdin is None else Input(stdin)
        self.stdout = None if stdout is None else Output(stdout)
        self.stderr = None if stderr is None else Output(stderr)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def pid(self) -> int:
        """The command's pid on the host."""
        return self._command.pid

    async def await_start(self) -> None:
        """Waits until the command is there. Raises SandboxError when it can never be."""
        reports = self._command.reports
        while not reports.is_decided:
            await anyio.wait_readable(reports.fileno())
            reports.read()
        self._command.check_started()

    async def wait(self) -> int:
        """Waits for the end; the exit status (128+n for signal n). A cancelled wait kills nothing.

        Raises SandboxError when the program is not there or cannot be executed.
        """
        await _await_end(self._command)
        return self._command.exit_status()

    def send_signal(self, number: int) -> None:
        """Signals the command itself; one that has ended is left alone."""
        self._command.reports.send_signal(number)

    async def kill(self) -> None:
        """Ends the command and all it started, and waits for that."""
        await _kill(self._command)

    async def aclose(self) -> None:
        """Kills what still runs, and closes the pipes; cancelled or not."""
        try:
            await _kill(self._command)
        finally:
            self._command.reports.close()
            for stream in (self.stdin, self.stdout, self.stderr):
                if stream is not None:
                    stream.close()


async def _await_end(command: Command) -> None:
    while command.reports.status is None:
        await anyio.wait_readable(command.reports.fileno())
        command.reports.read()


async def _kill(command: Command) -> None:
    """Ends a command and waits for that, for a while, whoever is cancelled."""
    if command.reports.status is None:
        command.reports.kill()
        with anyio.move_on_after(KILL_TIMEOUT_S, shield=True):
            await _await_end(command)
