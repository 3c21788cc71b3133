"""The asker's end of sandboxes that stay open: starts their host, opens them, runs commands.

Nothing here forks: the asker may have threads. Sockets are the only state, so everything may be
called from any thread, and what is waited for can be waited for by any event loop.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from snapshotter.errors import SandboxError, UnavailableError
from snapshotter.paths import Paths
from snapshotter.service import sandbox_messages as messages
from snapshotter.service.daemon_process import make_run_directory, spawn
from snapshotter.service.sandbox_init import REPORT_FAILED, REPORT_READY
from snapshotter.service.sandbox_spec import Plan, Surroundings

ANSWER_TIMEOUT_S = 30.0
"""How long a sandbox's process may take for anything but a command."""

_SO_PASSPIDFD, _SCM_PIDFD = 76, 0x04
"""asm-generic/socket.h and linux/socket.h, since Linux 6.5: a pidfd of whoever sent a message."""
_CREDENTIALS = struct.Struct("=iII")
_DESCRIPTOR = struct.Struct("=i")
_ANCILLARY_BYTES = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(_DESCRIPTOR.size)
_REPORT_BYTES = 16_384


class SandboxHost:
    """The process that forks sandboxes' processes. It ends when this is closed; they do not."""

    def __init__(self, paths: Paths) -> None:
        """Starts it. Raises UnavailableError, or AccessDeniedError for the run directory."""
        make_run_directory(paths.run)
        self._log = paths.log("sandboxes")
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        us = os.pidfd_open(os.getpid())
        command = (sys.executable, "-P", "-m", "snapshotter.service.sandbox_host")
        try:
            self._pid = spawn(command, self._log, passed=(theirs.fileno(), us))
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()
            os.close(us)

    def open(self) -> SandboxLink:
        """A new sandbox's process. Raises UnavailableError when the host is gone or silent."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            ours.settimeout(ANSWER_TIMEOUT_S)
            with theirs:
                socket.send_fds(self._socket, [b"N"], [theirs.fileno()])
            hello = ours.recv(messages.MESSAGE_BYTES)
            return SandboxLink(ours, int(hello.removeprefix(messages.HELLO)))
        except (OSError, ValueError) as error:  # no number: the process has ended
            ours.close()
            raise UnavailableError(
                f"start a sandbox: its process does not answer ({error}); see {self._log}"
            ) from error

    def close(self) -> None:
        """Ends the host."""
        self._socket.close()
        try:
            os.waitpid(self._pid, 0)
        except ChildProcessError:
            pass  # the program collects its children itself, or ignores them


class RunReports:
    """What is known of one command, as its reports come. Wait for ``fileno`` to be readable.

    ``pid`` is the command's here on the host, once it is there; ``status`` its exit status (128+n
    for signal n) once it, and all that it started, has ended; ``failure`` why it could not be run.
    """

    def __init__(self, reports: socket.socket) -> None:
        self._socket = reports
        self._pidfd: int | None = None
        self.pid: int | None = None
        self.status: int | None = None
        self.failure: SandboxError | None = None

    def fileno(self) -> int:
        """The descriptor that becomes readable when there is something to ``read``."""
        return self._socket.fileno()

    @property
    def is_decided(self) -> bool:
        """Whether the command is there, or cannot be."""
        return self.pid is not None or self.failure is not None or self.status is not None

    def read(self) -> None:
        """Takes in all reports that came; never waits."""
        while self.status is None:
            try:
                data, ancillary, _, _ = self._socket.recvmsg(_REPORT_BYTES, _ANCILLARY_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # told once, before what came: a KILL was sent that nobody read
            except OSError:
                data, ancillary = b"", []
            self._take(data, {kind: raw for _, kind, raw in ancillary})

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for the next report; False when none came in time."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if not poll.poll(None if timeout_s is None else max(0, timeout_s) * 1000):
            return False
        self.read()
        return True

    def send_signal(self, number: int) -> None:
        """Signals the command itself; one that has ended, or is not there yet, is left alone."""
        if self._pidfd is not None:
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:
                pass

    def kill(self) -> None:
        """Has all processes of the command killed; ``status`` says when that is done."""
        try:
            self._socket.send(messages.KILL)
        except OSError:
            pass  # it has ended

    def close(self) -> None:
        """Forgets the command; one that runs is killed."""
        self._socket.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def _take(self, data: bytes, ancillary: dict[int, bytes]) -> None:
        kind, rest = data[:1], data[1:]
        pidfd = _DESCRIPTOR.unpack(ancillary.get(_SCM_PIDFD, b"\xff\xff\xff\xff"))[0]
        if kind == REPORT_READY:
            self.pid = _CREDENTIALS.unpack(ancillary[socket.SCM_CREDENTIALS])[0]
            self._pidfd, pidfd = (pidfd if pidfd >= 0 else None), -1
        elif kind == REPORT_FAILED:
            self.failure = SandboxError(rest[1:].decode(errors="replace"), rest[0])
        elif kind == messages.REPORT_ENDED:
            self.status = rest[0]
        elif not data:
            self.status = 128 + signal.SIGKILL
            self.failure = SandboxError("run: the sandbox was closed or killed")
        if pidfd >= 0:
            os.close(pidfd)


class SandboxLink:
    """One sandbox's process. First ``enter``, then any number of runs; ``close`` ends all.

    ``pid`` is the owner to name when its view is asked for.
    """

    def __init__(self, link: socket.socket, pid: int) -> None:
        self._socket = link
        self.pid = pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def enter(self, view: int, surroundings: Surroundings, *, staging: Path) -> int:
        """Makes the detached mount ``view`` the sandbox's root; a descriptor (O_PATH) of that.

        ``staging`` is an existing directory of the host; only the sandbox sees something mounted
        there, for a moment. Close the descriptor before ``release``: it holds the view.
        Raises SandboxError when it cannot be done, UnavailableError when nothing is answered.
        """
        entry = messages.ENTER + messages.encode_entry(surroundings, staging)
        descriptors = self._ask(entry, [view], messages.ENTERED, "make the sandbox")
        return descriptors[0]

    def run(self, plan: Plan, streams: Sequence[int]) -> RunReports:
        """Runs a command with ``streams`` as stdin, stdout and stderr; does not wait for it.

        Raises UnavailableError when the sandbox is gone.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for option in (socket.SO_PASSCRED, _SO_PASSPIDFD):
            ours.setsockopt(socket.SOL_SOCKET, option, 1)
        ours.setblocking(False)
        written = messages.write_plan(plan)
        try:
            with theirs:
                beside = [written, *streams, theirs.fileno()]
                socket.send_fds(self._socket, [messages.RUN], beside)
        except OSError as error:
            ours.close()
            raise UnavailableError(f"run {plan.arguments[0]}: the sandbox is closed") from error
        finally:
            os.close(written)
        return RunReports(ours)

    def release(self) -> None:
        """Kills what runs and frees the view: when this returns, it stands nowhere any more.

        Raises UnavailableError when the process is gone (then the view is, too) or silent.
        """
        self._ask(messages.RELEASE, [], messages.RELEASE, "close the sandbox")

    def close(self) -> None:
        """Ends the sandbox, wherever it stands."""
        self._socket.close()

    def _ask(self, message: bytes, descriptors: list[int], answer: bytes, what: str) -> list[int]:
        try:
            socket.send_fds(self._socket, [message], descriptors)
            data, came, _, _ = socket.recv_fds(self._socket, messages.MESSAGE_BYTES, 1)
        except OSError as error:
            raise UnavailableError(f"{what}: its process does not answer: {error}") from error
        if data[:1] == answer:
            for descriptor in came:
                os.set_inheritable(descriptor, False)  # recv_fds passes no flags on
            return came
        for descriptor in came:
            os.close(descriptor)  # of an answer that came too late
        if data[:1] == messages.FAILED:
            raise SandboxError(f"{what}: {data[1:].decode(errors='replace')}")
        raise UnavailableError(f"{what}: its process has ended")
