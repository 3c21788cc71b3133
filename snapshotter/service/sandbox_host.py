"""The processes behind sandboxes that stay open for several commands.

The host is one process for each program that opens sandboxes. It was started afresh, not forked
from that program, which may have threads; for each sandbox it forks a process, quickly, since
everything is loaded. That process owns the sandbox's mount, ipc and uts namespaces and its root,
and forks one first process for each command, with a pid namespace and a /proc of the command's
own: so the kernel itself ends all that a command started when it ends, or is to end.

Everything ends with the asker: its end of a socket goes away, or (when a fork of it still has
that) its own process does. What is killed here is killed by the kernel too if this process dies,
by parent-death signals, and the view ends with its last mount namespace.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from dataclasses import dataclass
from typing import NoReturn

from snapshotter.kernel_view import syscalls
from snapshotter.service import sandbox_messages as messages
from snapshotter.service.sandbox_init import (
    REPORT_FAILED,
    STATUS_FAILED,
    Start,
    be_first_process,
    keep_only,
)
from snapshotter.service.sandbox_root import enter_root, show_processes

HOST_DESCRIPTOR, ASKER_DESCRIPTOR = 3, 4
"""What the host is started with: its socket, and a pidfd of the asker."""

_STATUS_KILLED = 128 + signal.SIGKILL


@dataclass(slots=True)
class _Run:
    """A command: the pid of its first process, a pidfd of that, and our end of its socket."""

    first: int
    pidfd: int
    report: socket.socket
    is_ending: bool = False


class SandboxProcess:
    """The life of one sandbox's process, from its fork to its end."""

    def __init__(self, asker_socket: socket.socket, asker: int) -> None:
        self._asker_socket = asker_socket
        self._asker = asker
        self._runs: list[_Run] = []
        self._is_entered = False
        # /proc is out of reach later
        self._pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._host_mounts = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)

    def serve(self) -> NoReturn:
        """Answers until the asker is gone; then ends everything, itself last."""
        try:
            self._asker_socket.send(messages.HELLO + str(os.getpid()).encode())
            while self._wait_and_act():
                pass
        except OSError:
            pass  # the asker went away in the middle of something
        finally:
            self._end_all()
            os._exit(0)

    def _wait_and_act(self) -> bool:
        """One round of waiting; False when the asker is gone."""
        poll = select.poll()
        for descriptor in (self._asker_socket.fileno(), self._asker):
            poll.register(descriptor, select.POLLIN)
        for run in self._runs:
            poll.register(run.pidfd, select.POLLIN)
            if not run.is_ending:
                poll.register(run.report.fileno(), select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll()}
        for run in list(self._runs):
            if run.pidfd in ready:
                self._collect(run)
            elif run.report.fileno() in ready:
                self._kill(run)
        if self._asker in ready:
            return False
        return self._asker_socket.fileno() not in ready or self._answer()

    def _answer(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(
            self._asker_socket, messages.MESSAGE_BYTES, messages.RUN_DESCRIPTORS
        )
        kind, body = data[:1], data[1:]
        try:
            if kind == messages.ENTER:
                self._enter(body, descriptors[0])
            elif kind == messages.RUN:
                self._start(*descriptors)
            elif kind == messages.RELEASE:
                self._release()
        except Exception as error:  # noqa: BLE001 - the asker is told, whatever it is
            self._asker_socket.send(messages.FAILED + _encode(str(error)))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return bool(data)

    def _enter(self, body: bytes, view: int) -> None:
        surroundings, staging = messages.decode_entry(body)
        syscalls.unshare(syscalls.CLONE_NEWNS | syscalls.CLONE_NEWUTS | syscalls.CLONE_NEWIPC)
        self._is_entered = True
        enter_root(view, surroundings, staging=staging)
        root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            socket.send_fds(self._asker_socket, [messages.ENTERED], [root])
        finally:
            os.close(root)

    def _start(self, plan: int, stdin: int, stdout: int, stderr: int, report: int) -> None:
        reports = socket.socket(fileno=os.dup(report))
        try:
            first = self._fork(plan, (stdin, stdout, stderr), reports)
            self._runs.append(_Run(first, os.pidfd_open(first), reports))
        except Exception as error:  # noqa: BLE001 - the asker is told, whatever it is
            _tell(reports, REPORT_FAILED + bytes([STATUS_FAILED]) + _encode(f"run: {error}"))
            _tell(reports, messages.REPORT_ENDED + bytes([STATUS_FAILED]))
            reports.close()

    def _fork(self, plan: int, streams: tuple[int, int, int], report: socket.socket) -> int:
        if not self._is_entered:
            raise OSError("the sandbox is closed")
        begin = Start(plan=messages.read_plan(plan), enter=_enter_run, report=report)
        syscalls.unshare(syscalls.CLONE_NEWPID)
        try:
            first = os.fork()
        finally:
            if os.getpid() != 1:
                syscalls.setns(self._pid_namespace, syscalls.CLONE_NEWPID)
        if first == 0:
            _be_first(begin, streams)
        return first

    def _kill(self, run: _Run) -> None:
        """Ends a run as its asker wants, who said KILL or is gone."""
        run.is_ending = True
        os.kill(run.first, signal.SIGKILL)  # not collected yet: it is still that process

    def _collect(self, run: _Run) -> None:
        """Waits for the end of a run's first process, and tells its asker."""
        _, status = os.waitpid(run.first, 0)
        code = os.waitstatus_to_exitcode(status)
        _tell(run.report, messages.REPORT_ENDED + bytes([code if code >= 0 else _STATUS_KILLED]))
        self._runs.remove(run)
        os.close(run.pidfd)
        run.report.close()

    def _end_all(self) -> None:
        for run in self._runs:
            self._kill(run)
        for run in list(self._runs):
            self._collect(run)

    def _release(self) -> None:
        """Lets go of the view: with its last process the mount namespace ends."""
        self._end_all()
        syscalls.setns(self._host_mounts, syscalls.CLONE_NEWNS)
        self._is_entered = False
        self._asker_socket.send(messages.RELEASE)


def _be_first(begin: Start, streams: tuple[int, int, int]) -> NoReturn:
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        keep_only(begin.report.fileno())
        be_first_process(begin)
    finally:
        os._exit(STATUS_FAILED)  # never back into the sandbox's own process


def _enter_run() -> None:
    syscalls.unshare(syscalls.CLONE_NEWNS)
    show_processes()


def _tell(report: socket.socket, message: bytes) -> None:
    try:
        report.send(message)
    except OSError:
        pass  # nobody is left to be told


def _encode(text: str) -> bytes:
    return text.encode(errors="surrogateescape")[: messages.MESSAGE_BYTES - 2]


def main() -> None:
    """The host: forks a sandbox's process for each socket that it is sent, until its own ends."""
    host = socket.socket(fileno=HOST_DESCRIPTOR)
    os.closerange(ASKER_DESCRIPTOR + 1, os.sysconf("SC_OPEN_MAX"))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a sandbox's process ended
    poll = select.poll()
    poll.register(host, select.POLLIN)
    poll.register(ASKER_DESCRIPTOR, select.POLLIN)
    while ASKER_DESCRIPTOR not in {descriptor for descriptor, _ in poll.poll()}:
        data, descriptors, _, _ = socket.recv_fds(host, 1, 1)
        if not data:
            return
        asker_socket = socket.socket(fileno=descriptors[0])
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            host.close()
            SandboxProcess(asker_socket, ASKER_DESCRIPTOR).serve()
        asker_socket.close()


if __name__ == "__main__":
    main()
