"""The inside of a sandbox: its first process, and the step from there to the command.

The first process (pid 1 of the sandbox) makes the root, forks the command and then only reaps:
a command that is pid 1 itself would be deaf to signals that it does not handle and would collect
its orphans' zombies. It tells its parent what happens in one-datagram reports.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import NoReturn

from snapshotter.service.sandbox_spec import Plan, find_program
from snapshotter.service.sandbox_user import become, die_with_parent, look_up_here

STATUS_FAILED, STATUS_NOT_EXECUTABLE, STATUS_NOT_FOUND = 125, 126, 127
"""Exit statuses of ours, as container engines and shells have them."""

REPORT_READY = b"R"
"""The command is about to be executed; the datagram's credentials carry its pid."""
REPORT_FAILED = b"F"
"""Followed by one byte of exit status and the message; the sandbox ends."""
REPORT_STOPPED = b"S"
"""Followed by the number of the signal that stopped the command."""

_MAX_MESSAGE_BYTES = 8192
_MAX_DESCRIPTOR = 1 << 30
_UMASK = 0o022


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What the first process needs. ``enter`` takes it to its namespaces and root, ``report`` is
    its end of the pair, ``signal_mask`` what the command starts with; ``takes_terminal`` puts the
    command in the foreground of the terminal that is its stdin, and
    ``tells_stops`` has it told when the command was stopped.
    """

    plan: Plan
    enter: Callable[[], None]
    report: socket.socket
    signal_mask: Set[int] = frozenset()
    takes_terminal: bool = False
    tells_stops: bool = False


def be_first_process(start: Start) -> NoReturn:
    """The life of the first process, from its fork to its end."""
    status = STATUS_FAILED
    try:
        die_with_parent()
        if _is_alone(start.report):
            os._exit(status)
        os.setpgid(0, 0)  # the terminal's signals are for the command alone
        start.enter()
        os.umask(_UMASK)
        command = os.fork()
        if command == 0:
            _be_command(start)
        status = _reap_until(command, start.report if start.tells_stops else None)
    except BaseException as error:  # noqa: BLE001 - the parent is told, whatever it is
        _tell_failure(start.report, STATUS_FAILED, f"make the sandbox: {error}")
    os._exit(status)


def _is_alone(report: socket.socket) -> bool:
    """Whether the parent ended before its end could be noticed by the kernel's signal."""
    try:
        return report.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False


def _tell_failure(report: socket.socket, status: int, message: str) -> None:
    text = message.encode(errors="surrogateescape")[:_MAX_MESSAGE_BYTES]
    try:
        report.send(REPORT_FAILED + bytes([status]) + text)
    except OSError:
        pass  # the parent is gone; nobody is left to tell


def _reap_until(command: int, report: socket.socket | None) -> int:
    """Collects every process that ends until the command does; its status, as shells write it.

    ``report`` is told when the command is stopped.
    """
    while True:
        pid, status = os.waitpid(-1, os.WUNTRACED)
        if pid != command:
            continue
        if not os.WIFSTOPPED(status):
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        if report is None:
            continue
        try:
            report.send(REPORT_STOPPED + bytes([os.WSTOPSIG(status)]))
        except OSError:
            pass  # the parent is about to go, and we with it


def _be_command(start: Start) -> NoReturn:
    """Turns the second process into the command; its failure is told and is its end."""
    status = STATUS_FAILED
    try:
        os.setpgid(0, 0)
        environment = _enter_identity(start.plan)
        if start.takes_terminal:
            os.tcsetpgrp(0, os.getpid())
        start.report.send(REPORT_READY)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # the interpreter ignores them
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, start.signal_mask)
        keep_only(start.report.fileno())
        status, message = _execute(start.plan.arguments, environment)
    except BaseException as error:  # noqa: BLE001 - the parent is told, whatever it is
        message = f"start the command: {error}"
    _tell_failure(start.report, status, message)
    os._exit(status)


def _enter_identity(plan: Plan) -> dict[str, str]:
    """Becomes the plan's user in its working directory; the environment with HOME."""
    identity = look_up_here(plan.user)
    try:
        os.makedirs(plan.workdir, exist_ok=True)
        os.chdir(plan.workdir)
    except OSError as error:
        raise OSError(
            error.errno, f"enter the working directory {plan.workdir}: {error.strerror}"
        ) from error
    become(identity)
    return {"HOME": identity.home, **plan.environment}


def keep_only(descriptor: int) -> None:
    """Closes every descriptor but this, stdin, stdout and stderr."""
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, _MAX_DESCRIPTOR)


def _execute(arguments: Sequence[str], environment: dict[str, str]) -> tuple[int, str]:
    """Executes the first program that is there; returns only a failure: status and message."""
    refused: OSError | None = None
    for program in find_program(arguments[0], environment.get("PATH", "")):
        try:
            os.execve(program, list(arguments), environment)  # noqa: S606 - no shell is wanted
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                refused = refused or error
            elif os.path.isfile(program):
                return STATUS_NOT_FOUND, f"{program}: its interpreter is not in the image"
    if refused is not None:
        return STATUS_NOT_EXECUTABLE, f"{arguments[0]}: cannot be executed: {refused.strerror}"
    return STATUS_NOT_FOUND, f"{arguments[0]}: not found in the image"
