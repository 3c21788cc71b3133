"""Runs one guest: QEMU as a child, the command's streams, its exit status.

The guest's init and this module talk by lines on the port ``status`` (guest_init.sh says which).
Without a terminal the command's streams are virtio-serial ports, byte for byte; with one, QEMU
has the terminal itself.
"""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import socket
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from snapshotter.errors import SandboxError
from snapshotter.service.sandbox_user import die_with_parent
from snapshotter.vm.qemu import GuestParts, Machine, command_line
from snapshotter.vm.streams import Input, Lines, Output

_PASSED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_LOG_TAIL_BYTES = 2048
_END_PATIENCE_S = 30.0
"""How long a guest may write back and unmount after its command."""
_POLL_S = 0.1
CONSOLE_LOG = "console.log"


class GuestSilentError(SandboxError):
    """The guest's init did not say a word in time: its kernel does not start on this machine."""


@dataclass(frozen=True, slots=True)
class Companion:
    """A process that the guest needs, as a virtio-fs back end; ``log`` says why it ended."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path


def new_end_mark() -> str:
    """What no output contains by chance."""
    return f"[end {secrets.token_hex(16)}]"


class Guest:
    """One guest, from its start to its end. ``directory`` is private to it and QEMU works there."""

    def __init__(
        self,
        machine: Machine,
        parts: GuestParts,
        *,
        directory: Path,
        end_mark: str,
        companions: Sequence[Companion] = (),
    ) -> None:
        self._machine = machine
        self._parts = parts
        self._directory = directory
        self._mark = end_mark.encode()
        self._companions = companions
        self._status_port: socket.socket | None = None
        self._outputs: list[Output] = []
        self._input: Input | None = None
        self._has_spoken = threading.Event()
        self._failure: str | None = None
        self._ended_at: float | None = None
        self.status: int | None = None
        """The exit status of the command, once it is known."""

    def run(self, *, silence_s: float | None = None) -> int:
        """Runs the guest to its end; the exit status of its command.

        Raises SandboxError when the guest could not run it, or QEMU or a companion ended before
        it; GuestSilentError when the guest says nothing for ``silence_s`` after its start.
        """
        with ExitStack() as stack:
            ports = self._make_ports(stack)
            process = self._start(ports, stack)
            readers = self._serve_ports({name: ours for name, (ours, _) in ports.items()})
            stack.enter_context(_passed_on(self._send))
            trouble = self._wait(process, silence_s)
            _end(process)
            for reader in readers:
                reader.join()
        if self.status is not None:
            return self.status
        raise SandboxError(f"run in a guest: {self._failure or trouble}{self._last_words()}")

    def _make_ports(self, stack: ExitStack) -> dict[str, tuple[socket.socket, socket.socket]]:
        names = ("status",) if self._parts.has_terminal else ("status", "stdin", "stdout", "stderr")
        ports = {name: socket.socketpair() for name in names}
        for pair in ports.values():
            for end in pair:
                stack.callback(end.close)
        return ports

    def _start(
        self, ports: Mapping[str, tuple[socket.socket, socket.socket]], stack: ExitStack
    ) -> subprocess.Popen[bytes]:
        descriptors = {name: theirs.fileno() for name, (_, theirs) in ports.items()}
        parts = replace(self._parts, ports=descriptors, console_log=CONSOLE_LOG)
        with_terminal = parts.has_terminal
        if with_terminal:
            settings = termios.tcgetattr(0)
            stack.callback(termios.tcsetattr, 0, termios.TCSADRAIN, settings)
        log = stack.enter_context((self._directory / "qemu.log").open("wb"))
        process = subprocess.Popen(
            command_line(self._machine, parts),
            cwd=self._directory,
            stdin=None if with_terminal else subprocess.DEVNULL,
            stdout=None if with_terminal else log,
            stderr=log,
            pass_fds=tuple(descriptors.values()),
            preexec_fn=die_with_parent,  # noqa: PLW1509 - no other thread has started yet
            start_new_session=not with_terminal,  # a terminal's signals are ours to pass on
        )
        stack.callback(_end, process)
        for _, theirs in ports.values():
            theirs.close()
        return process

    def _serve_ports(self, ports: Mapping[str, socket.socket]) -> Sequence[threading.Thread]:
        self._status_port = ports["status"]
        status = Lines(ports["status"], self._hear)
        if not self._parts.has_terminal:
            self._outputs = [
                Output(ports["stdout"], 1, self._mark),
                Output(ports["stderr"], 2, self._mark),
            ]
            self._input = Input(0, ports["stdin"])  # begins when the guest speaks
        for thread in (*self._outputs, status):
            thread.start()
        return (*self._outputs, status)

    def _hear(self, line: str) -> None:
        """A line of the guest's init."""
        word, _, rest = line.partition(" ")
        if not self._has_spoken.is_set():
            self._has_spoken.set()
            if self._input is not None:
                self._input.start()
        if word == "failed":
            self._failure = rest
        elif word == "exit" and rest.isdigit():
            for output in self._outputs:
                output.join()
            self.status = int(rest)
            self._ended_at = time.monotonic()
            self._send("done")

    def _send(self, line: str) -> None:
        assert self._status_port is not None
        try:
            self._status_port.sendall(line.encode() + b"\n")
        except OSError:
            return  # the guest has ended by itself

    def _wait(self, process: subprocess.Popen[bytes], silence_s: float | None) -> str:
        """Returns once QEMU or a companion has ended, with what to say if that was too early."""
        until = None if silence_s is None else time.monotonic() + silence_s
        with selectors.DefaultSelector() as ends, ExitStack() as stack:
            for name, pid in [
                ("QEMU", process.pid),
                *((c.name, c.process.pid) for c in self._companions),
            ]:
                descriptor = os.pidfd_open(pid)
                stack.callback(os.close, descriptor)
                ends.register(descriptor, selectors.EVENT_READ, name)
            while True:
                waits = until is not None and not self._has_spoken.is_set()
                ready = ends.select(_POLL_S)
                if ready and waits:
                    raise GuestSilentError(
                        f"{ready[0][0].data} ended before the guest said a word{self._last_words()}"
                    )
                if ready:
                    return f"{ready[0][0].data} ended before the command did"
                if waits and until is not None and time.monotonic() > until:
                    raise GuestSilentError(f"the guest's kernel said nothing for {silence_s:g} s")
                if (
                    self._ended_at is not None
                    and time.monotonic() > self._ended_at + _END_PATIENCE_S
                ):
                    return "the guest does not switch itself off"

    def _last_words(self) -> str:
        logs = [self._directory / "qemu.log", self._directory / CONSOLE_LOG]
        logs += [companion.log for companion in self._companions]
        texts = [_tail(path) for path in logs]
        return "".join(
            f"\n--- {path.name}\n{text}" for path, text in zip(logs, texts, strict=True) if text
        )


@contextmanager
def _passed_on(send: Callable[[str], None]) -> Any:
    """While it lasts, signals that would end this process go to the command in the guest."""
    before = {
        number: signal.signal(number, lambda number, _: send(f"signal {number}"))
        for number in _PASSED_SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()


def _tail(path: Path) -> str:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return ""
    return data[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
