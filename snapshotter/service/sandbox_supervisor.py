"""The outside of a sandbox: passes signals on, lends the terminal, and knows how it ended.

The command has a process group of its own, so that what it does to its group never reaches the
caller's. It is given the terminal's foreground at once when stdin and stdout are the terminal,
else when it first asks for it (the kernel then stops it with SIGTTIN or SIGTTOU). While it has
the foreground, Ctrl-C goes from the terminal to the command alone; while it has not, Ctrl-C
comes here and is passed on: once, either way.
"""

from __future__ import annotations

import fcntl
import functools
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Self

from snapshotter.errors import SandboxError
from snapshotter.kernel_view import syscalls
from snapshotter.service.sandbox_init import (
    REPORT_FAILED,
    REPORT_READY,
    REPORT_STOPPED,
    Start,
    be_first_process,
)
from snapshotter.service.sandbox_root import enter_root, show_processes
from snapshotter.service.sandbox_spec import Plan, Surroundings

_FATAL = frozenset((signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM))
_FORWARDED = _FATAL | {
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGWINCH,
    signal.SIGALRM,
    signal.SIGTSTP,
    signal.SIGCONT,
}
_STOPS = frozenset((signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU))
_WATCHED = _FORWARDED | _STOPS | {signal.SIGCHLD, signal.SIGIO}
_SI_KERNEL = 128
"""si_code of a signal that the terminal sent, to its whole foreground group."""

_REPORT_BYTES = 16_384
_CREDENTIALS = struct.Struct("=iII")
"""struct ucred: pid as seen from here, uid, gid."""


class Terminal:
    """The controlling terminal, where stdin (or else /dev/tty) is one."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self.is_lent = False
        try:
            if os.isatty(0):
                self._descriptor = os.dup(0)
            else:
                self._descriptor = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
            os.tcgetpgrp(self._descriptor)
        except OSError:
            self.close()

    def close(self) -> None:
        """Forgets the terminal."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @property
    def is_in_front(self) -> bool:
        """Whether our process group is the terminal's foreground group."""
        return self._descriptor is not None and os.tcgetpgrp(self._descriptor) == os.getpgrp()

    def lend(self, group: int) -> None:
        """Puts a process group in the foreground."""
        self._give(group)
        self.is_lent = True

    def take_back(self) -> None:
        """Puts our own group in the foreground, if the terminal was lent."""
        if self.is_lent:
            self._give(os.getpgrp())
            self.is_lent = False

    def _give(self, group: int) -> None:
        if self._descriptor is not None:
            try:
                os.tcsetpgrp(self._descriptor, group)
            except (ProcessLookupError, PermissionError):
                pass  # that group has just ended


class Sandbox:
    """One running sandbox. Made by ``start``; ``supervise`` is then called once."""

    def __init__(self, first: int, reports: socket.socket, mask: set[int | signal.Signals]) -> None:
        """``first`` is the first process; ``mask`` the signal mask to go back to."""
        self._first = first
        self._reports = reports
        self._mask = mask
        self._terminal = Terminal()
        self._command: int | None = None
        self._wants_terminal_again = False
        self._failure: SandboxError | None = None
        self._fatal_signal: int | None = None
        self._on_ready: Callable[[int], None] = lambda _pid: None

    @classmethod
    def start(cls, plan: Plan, view: int, surroundings: Surroundings, *, staging: Path) -> Self:
        """Forks the first process; signals are blocked from here to the end of ``supervise``."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        begin = Start(
            plan=plan,
            enter=functools.partial(_enter, view, surroundings, staging),
            report=theirs,
            signal_mask=mask,
            takes_terminal=_is_interactive(),
            tells_stops=True,
        )
        try:
            first = _fork_into_pid_namespace(begin, ours)
        except BaseException:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            ours.close()
            raise
        finally:
            theirs.close()
        sandbox = cls(first, ours, mask)
        sandbox._terminal.is_lent = begin.takes_terminal
        return sandbox

    def supervise(self, on_ready: Callable[[int], None]) -> int:
        """Waits for the end; the command's exit status.

        ``on_ready`` is told the first process's pid when the command is about to run. Raises
        SandboxError when it could not be started.
        """
        self._on_ready = on_ready
        self._reports.setblocking(False)
        number = self._reports.fileno()
        fcntl.fcntl(number, fcntl.F_SETOWN, os.getpid())
        flags = fcntl.fcntl(number, fcntl.F_GETFL)
        fcntl.fcntl(number, fcntl.F_SETFL, flags | os.O_ASYNC)  # SIGIO for each report
        try:
            self._read_reports()  # those that came before
            status = self._wait()
        finally:
            self._end()
        if self._failure is not None:
            raise self._failure
        if self._command is None and self._fatal_signal is None:
            raise SandboxError(f"run: the sandbox ended while it was made (status {status})")
        return status

    def _wait(self) -> int:
        while True:
            ended, status = os.waitpid(self._first, os.WNOHANG)
            if ended:
                self._read_reports()
                code = os.waitstatus_to_exitcode(status)
                if self._fatal_signal is not None and self._command is None:
                    return 128 + self._fatal_signal
                return code if code >= 0 else 128 - code
            came = signal.sigwaitinfo(_WATCHED)
            self._read_reports()  # a signal may overtake the report that the command is there
            if came.si_signo in _FORWARDED:
                self._pass_on(came.si_signo, is_from_terminal=came.si_code == _SI_KERNEL)

    def _end(self) -> None:
        self._reports.close()
        self._terminal.take_back()
        self._terminal.close()
        while signal.sigtimedwait(_WATCHED, 0) is not None:
            pass  # a pending SIGIO would end us now
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _read_reports(self) -> None:
        while True:
            try:
                data, ancillary, _, _ = self._reports.recvmsg(
                    _REPORT_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size)
                )
            except BlockingIOError:
                return
            if not data:
                return
            kind, rest = data[:1], data[1:]
            if kind == REPORT_READY:
                self._command = _CREDENTIALS.unpack(ancillary[0][2])[0]
                self._on_ready(self._first)
            elif kind == REPORT_FAILED:
                self._failure = SandboxError(rest[1:].decode(errors="replace"), rest[0])
            elif kind == REPORT_STOPPED:
                self._command_stopped(rest[0])

    def _pass_on(self, number: int, *, is_from_terminal: bool) -> None:
        if self._command is None:
            if number in _FATAL:
                self._fatal_signal = number
                os.kill(self._first, signal.SIGKILL)
            return
        if number == signal.SIGCONT and self._wants_terminal_again and self._terminal.is_in_front:
            self._terminal.lend(self._command)
        to_group = is_from_terminal or number == signal.SIGCONT
        try:
            (os.killpg if to_group else os.kill)(self._command, number)
        except ProcessLookupError:
            pass  # it has just ended; SIGCHLD comes next

    def _command_stopped(self, number: int) -> None:
        """Lends the terminal to a command that waits for it; else stops along with it."""
        assert self._command is not None
        if number not in _STOPS:
            return  # someone wants it stopped, not us
        if number != signal.SIGTSTP and self._terminal.is_in_front:
            self._terminal.lend(self._command)
            os.killpg(self._command, signal.SIGCONT)
        elif self._terminal.is_lent or self._terminal.is_in_front:
            self._wants_terminal_again = self._terminal.is_lent
            self._terminal.take_back()
            sys.stdout.flush()
            os.kill(0, signal.SIGSTOP)  # our shell sees its job stopped, and continues it


def _enter(view: int, surroundings: Surroundings, staging: Path) -> None:
    syscalls.unshare(syscalls.CLONE_NEWNS | syscalls.CLONE_NEWUTS | syscalls.CLONE_NEWIPC)
    enter_root(view, surroundings, staging=staging)
    show_processes()
    os.close(view)


def _is_interactive() -> bool:
    """Whether stdin and stdout are our terminal, and we are in its foreground."""
    try:
        return os.isatty(0) and os.isatty(1) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _fork_into_pid_namespace(begin: Start, ours: socket.socket) -> int:
    """The first process of a new pid namespace; later children are in our own again."""
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        syscalls.unshare(syscalls.CLONE_NEWPID)
        sys.stdout.flush()
        sys.stderr.flush()
        first = os.fork()
        if first == 0:
            ours.close()
            be_first_process(begin)
        syscalls.setns(own, syscalls.CLONE_NEWPID)
        return first
    finally:
        os.close(own)
