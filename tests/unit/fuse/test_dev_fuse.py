"""The transport over a socket pair, which like /dev/fuse gives and takes whole messages."""

import errno
import os
import socket
import struct
from collections.abc import Iterator

import pytest
import structlog

from snapshotter.errors import UnavailableError, UnsupportedError
from snapshotter.fuse import dev_fuse
from snapshotter.fuse.dev_fuse import Negotiated, Session, negotiate
from snapshotter.fuse.server import Server
from snapshotter.fuse.wire import InitFlag, Opcode
from tests.support.fuse_requests import request


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    kernel, device = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with kernel, device:
        yield kernel, device


def offer(minor: int, flags: int) -> bytes:
    words = (7, minor, 131072, flags & 0xFFFFFFFF, flags >> 32)
    return request(Opcode.INIT, struct.pack("=IIIII44x", *words), unique=1)


def test_only_what_is_offered_and_wanted_is_settled_on(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    kernel, device = pair
    offered = (
        InitFlag.INIT_EXT | InitFlag.PARALLEL_DIROPS | InitFlag.NO_OPEN_SUPPORT
        | InitFlag.AUTO_INVAL_DATA | InitFlag.HAS_RESEND | InitFlag.REQUEST_TIMEOUT | 1 << 37
    )  # fmt: skip
    kernel.send(offer(99, offered))
    settled = negotiate(device.fileno())
    flags = (
        InitFlag.INIT_EXT | InitFlag.PARALLEL_DIROPS | InitFlag.NO_OPEN_SUPPORT
        | InitFlag.HAS_RESEND
    )  # fmt: skip
    assert settled == Negotiated(minor=45, flags=flags, max_readahead=131072, max_write=4096)
    reply = kernel.recv(1000)
    assert struct.unpack_from("=IiQ", reply) == (80, 0, 1)
    assert struct.unpack_from("=IIII", reply, 16) == (7, 45, 131072, flags & 0xFFFFFFFF)
    max_background, _, max_write, _, max_pages, _, flags2, depth, timeout = struct.unpack_from(
        "=HHIIHHIIH", reply, 32
    )
    assert (max_background, max_write, max_pages) == (128, 4096, 256)
    assert (flags2, depth, timeout) == (flags >> 32, 0, 0)


def test_an_old_kernel_is_refused(pair: tuple[socket.socket, socket.socket]) -> None:
    kernel, device = pair
    kernel.send(offer(30, 0))
    with pytest.raises(UnsupportedError, match=r"7\.30"):
        negotiate(device.fileno())
    assert struct.unpack("=IiQ", kernel.recv(1000)) == (16, -errno.EPROTO, 1)


def test_a_descriptor_that_was_served_before_is_refused(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    kernel, device = pair
    kernel.send(request(Opcode.LOOKUP, b"name\0"))
    with pytest.raises(UnavailableError, match="mount the file system anew"):
        negotiate(device.fileno())


def session_of(device: socket.socket, answer: bytes = b"here") -> Session:
    server = Server({Opcode.LOOKUP: lambda _header, _message: answer}, report_fault=lambda *_: None)
    return Session(device.fileno(), server)


def end_after(monkeypatch: pytest.MonkeyPatch, *failures: int) -> None:
    """Reads fail so once nothing is there to be read any more."""
    remaining = list(failures)
    original = os.readv

    def readv(descriptor: int, buffers: list[bytearray]) -> int:
        try:
            with socket.socket(fileno=os.dup(descriptor)) as copy:
                copy.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            raise OSError(remaining.pop(0), "told to fail") from None
        return original(descriptor, buffers)

    monkeypatch.setattr(dev_fuse.os, "readv", readv)


@pytest.mark.parametrize("end", [errno.ENODEV, errno.ECONNABORTED])
def test_a_session_answers_until_the_file_system_is_gone(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch, end: int
) -> None:
    kernel, device = pair
    kernel.send(request(Opcode.LOOKUP, b"name\0", unique=4))
    kernel.send(b"not a request")
    kernel.send(request(999, b"", unique=6))
    end_after(monkeypatch, errno.ENOENT, end)
    session_of(device).run()
    assert kernel.recv(1000) == struct.pack("=IiQ", 20, 0, 4) + b"here"
    assert kernel.recv(1000) == struct.pack("=IiQ", 16, -errno.ENOSYS, 6)


def test_another_failure_of_the_device_is_not_hidden(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    end_after(monkeypatch, errno.EPERM)
    with pytest.raises(PermissionError):
        session_of(pair[1]).run()


def test_a_stopped_session_leaves_what_it_reads_unanswered(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    kernel, device = pair
    session = session_of(device)
    session.stop()
    kernel.send(request(Opcode.LOOKUP, b"name\0"))
    session.run()
    with pytest.raises(BlockingIOError):
        kernel.recv(1, socket.MSG_DONTWAIT)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENODEV])
def test_a_reply_that_nobody_waits_for_is_no_error(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, "told to fail")

    monkeypatch.setattr(dev_fuse.os, "writev", fail)
    session_of(pair[1]).reply(4, b"late")


def test_a_reply_that_the_device_refuses_is_an_error(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EINVAL, "told to fail")

    monkeypatch.setattr(dev_fuse.os, "writev", fail)
    with pytest.raises(OSError, match="told to fail"):
        session_of(pair[1]).reply(4, b"late")


def test_a_payload_that_the_disk_does_not_give_is_eio(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.writev

    def writev(descriptor: int, buffers: tuple[bytes, ...]) -> int:
        if len(buffers) > 1:
            raise OSError(errno.EFAULT, "told to fail")
        return original(descriptor, buffers)

    monkeypatch.setattr(dev_fuse.os, "writev", writev)
    with structlog.testing.capture_logs() as logs:
        session_of(pair[1]).reply(4, b"late")
    assert pair[0].recv(1000) == struct.pack("=IiQ", 16, -errno.EIO, 4)
    assert [(line["operation"], line["unique"]) for line in logs] == [("reply", 4)]


def test_resend_where_the_kernel_has_it_not(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, device = pair
    dev_fuse.resend(device.fileno())
    assert kernel.recv(100) == struct.pack("=IiQ", 16, 7, 0)

    def fail(*_: object) -> int:
        raise OSError(errno.EINVAL, "told to fail")

    monkeypatch.setattr(dev_fuse.os, "write", fail)
    with pytest.raises(UnsupportedError, match=r"Linux 6\.9"):
        dev_fuse.resend(device.fileno())


def test_is_connected(pair: tuple[socket.socket, socket.socket]) -> None:
    kernel, device = pair
    assert dev_fuse.is_connected(device.fileno())
    kernel.close()
    assert not dev_fuse.is_connected(device.fileno())
