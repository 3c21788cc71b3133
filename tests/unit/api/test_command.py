import os
import signal
import socket
import threading

import pytest

from snapshotter.api.cancelling import Cancellation
from snapshotter.api.command import Command, Completed, Streams, as_text, capture, check_status
from snapshotter.errors import (
    CommandFailedError,
    CommandTimeoutError,
    InvalidInputError,
    SandboxError,
    UnavailableError,
)
from snapshotter.service import sandbox_messages as messages
from snapshotter.service.sandbox_init import REPORT_FAILED, REPORT_READY
from snapshotter.service.sandbox_link import RunReports


class Peer:
    """The sandbox's end of a command: its streams and its socket for reports."""

    def __init__(self, *, stdin: bool = False) -> None:
        streams = Streams("pipe" if stdin else "null", "pipe", "pipe")
        with streams:
            self.stdin, self.stdout, self.stderr = map(os.dup, streams.theirs)
            ours, self.reports = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            ours.setblocking(False)
            self.command = Command(["it"], RunReports(ours), streams.take())

    def end(self, status: int) -> None:
        self.reports.send(messages.REPORT_ENDED + bytes([status]))
        for descriptor in (self.stdin, self.stdout, self.stderr):
            os.close(descriptor)
        self.reports.close()

    def await_kill(self) -> None:
        assert self.reports.recv(10) == messages.KILL
        self.end(128 + signal.SIGKILL)


def capturing(peer: Peer, data: bytes = b"", timeout_s: float | None = None) -> Completed[bytes]:
    return capture(peer.command, data, timeout_s, Cancellation())


def test_what_is_in_the_pipes_at_the_end_is_taken() -> None:
    peer = Peer()
    os.write(peer.stdout, b"o" * 60_000)
    os.write(peer.stderr, b"e")
    peer.end(3)
    assert capturing(peer) == Completed(["it"], 3, b"o" * 60_000, b"e")


def test_input_larger_than_a_pipe_goes_in_while_output_comes() -> None:
    peer = Peer(stdin=True)

    def echo() -> None:
        with open(peer.stdin, "rb", closefd=False) as file:
            while data := file.read1(9000):
                os.write(peer.stdout, data)
        peer.end(0)

    thread = threading.Thread(target=echo)
    thread.start()
    data = os.urandom(1 << 20)
    assert capturing(peer, data).stdout == data
    thread.join()


def test_a_command_that_reads_nothing_is_no_failure() -> None:
    peer = Peer(stdin=True)
    peer.end(0)
    assert capturing(peer, b"x" * (1 << 20)).exit_status == 0


def test_a_late_command_is_killed_and_its_output_told() -> None:
    peer = Peer()
    os.write(peer.stdout, b"so far")
    thread = threading.Thread(target=peer.await_kill)
    thread.start()
    with pytest.raises(CommandTimeoutError, match="it: killed after") as caught:
        capturing(peer, timeout_s=0.01)
    thread.join()
    assert caught.value.stdout == b"so far"


def test_a_cancelled_command_is_killed() -> None:
    peer = Peer()
    cancellation = Cancellation()
    killed = threading.Thread(target=peer.await_kill)
    killed.start()
    cancel = threading.Thread(target=cancellation.cancel)
    cancel.start()
    with pytest.raises(UnavailableError, match="cancelled"):
        capture(peer.command, b"", None, cancellation)
    cancel.join()
    killed.join()


def test_a_program_that_is_not_there_is_told_by_the_end_however_early_it_is_known() -> None:
    peer = Peer()
    reports = peer.command.reports
    peer.reports.send(REPORT_READY)
    peer.reports.send(REPORT_FAILED + bytes([127]) + b"not there")
    peer.end(127)
    peer.command.wait_end()
    assert reports.failure is not None
    peer.command.wait_decided()
    with pytest.raises(SandboxError, match="not there"):
        capturing(peer)


def test_a_sandbox_that_ends_before_its_command_is_there_is_told_at_once() -> None:
    peer = Peer()
    peer.reports.send(REPORT_FAILED + bytes([125]) + b"no such user")
    peer.end(125)
    with pytest.raises(SandboxError, match="no such user"):
        peer.command.wait_decided()
    with pytest.raises(SandboxError, match="no such user"):
        capturing(peer)


def test_an_exit_status_may_be_checked() -> None:
    check_status(Completed(["it"], 0, b"", b"noise"))
    with pytest.raises(CommandFailedError, match="it: exit status 7: why") as caught:
        check_status(Completed(["it"], 7, b"out", b"why\n"))
    assert (caught.value.exit_status, caught.value.stdout) == (7, b"out")


def test_text_is_utf8_and_the_rest_is_marked() -> None:
    done = as_text(Completed(["it"], 0, "ä".encode(), b"a\xffb"))
    assert (done.stdout, done.stderr) == ("ä", "a�b")


def test_streams_lead_where_they_are_told() -> None:
    with open(os.devnull, "rb") as file, Streams(file, "inherit", "stdout") as streams:
        assert streams.theirs == (file.fileno(), 1, 1)
        assert streams.take() == (None, None, None)
    with pytest.raises(InvalidInputError, match="'pip'"):
        Streams("null", "pip", "pipe")  # type: ignore[arg-type]


def test_streams_that_nobody_took_are_closed() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    with Streams("pipe", "pipe", "null"):
        pass
    assert sorted(os.listdir("/proc/self/fd")) == before
