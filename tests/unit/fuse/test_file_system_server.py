"""What a FUSE server adds to a file system, whose own conformance tests run through it too."""

import errno
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from snapshotter.fuse.cache_policy import BRIEF, FOREVER, UNCACHED, CachePolicy, KernelCache
from snapshotter.fuse.file_system_server import FileSystemServer
from snapshotter.fuse.server import FileRange
from snapshotter.fuse.wire import Opcode
from snapshotter.fuse.wire_changes import AttrField
from snapshotter.projection.image_lower import ObjectDirectory
from snapshotter.vfs import AttrChange, Caller, Pending
from tests.support.file_systems import file_system, make_sample
from tests.support.fuse_client import FuseClient
from tests.support.fuse_requests import request

USER = Caller(1000, 1000, 0o022)


class Told(KernelCache):
    """Notes what it is told."""

    def __init__(self, policy: CachePolicy) -> None:
        super().__init__(policy)
        self.open: list[Any] = []
        self.over: list[Any] = []

    def changing(self, nodeids: tuple[int, ...], names: tuple[tuple[int, bytes], ...]) -> None:
        self.open.append((nodeids, names))

    def changed(self, nodeids: tuple[int, ...], names: tuple[tuple[int, bytes], ...]) -> None:
        self.over.append((nodeids, names))


class Side:
    """A served file system and what is to be seen of it."""

    def __init__(self, fs: Any, policy: CachePolicy, *, writable: bool) -> None:
        self.faults: list[Exception] = []
        self.fetching: list[tuple[Pending, Callable[[Exception | None], None]]] = []
        self.late: list[tuple[int, Any]] = []
        self.cache = Told(policy)
        self.killed: set[int] = set()
        self.server = FileSystemServer(
            fs,
            self.cache,
            writable=writable,
            report_fault=lambda error, _header: self.faults.append(error),
            fetch=lambda pending, done: self.fetching.append((pending, done)),
            is_being_killed=self.killed.__contains__,
        )
        self.client = FuseClient(self.ask)

    def ask(self, raw: bytes) -> bytes | None:
        reply = self.server.handle(memoryview(raw), lambda *late: self.late.append(late))
        return None if reply is None else b"".join(reply)


@contextmanager
def side(
    tmp_path: Path, kind: str = "upper on an image", policy: CachePolicy = BRIEF
) -> Iterator[Side]:
    make_sample(tmp_path / "sample")
    with file_system(kind, tmp_path / "sample", tmp_path) as fs:
        yield Side(fs, policy, writable=kind.startswith("upper"))


def timeouts(entry: bytes) -> tuple[int, int]:
    entry_s, attr_s, entry_ns, attr_ns = struct.unpack_from("=QQII", entry, 16)
    return entry_s * 10**9 + entry_ns, attr_s * 10**9 + attr_ns


def refused(call: Callable[..., Any], *arguments: Any) -> int:
    with pytest.raises(OSError) as caught:  # noqa: PT011
        call(*arguments)
    return caught.value.errno or 0


@pytest.mark.parametrize("policy", [UNCACHED, BRIEF, FOREVER])
def test_timeouts_are_the_policys(tmp_path: Path, policy: CachePolicy) -> None:
    with side(tmp_path, "image", policy) as seen:
        entry = seen.client.ask(Opcode.LOOKUP, 1, b"file\0")
        assert timeouts(entry) == (policy.entry_ttl_ns, policy.attr_ttl_ns)
        attr = seen.client.ask(Opcode.GETATTR, 1, bytes(16))
        assert struct.unpack_from("=QI", attr) == divmod(policy.attr_ttl_ns, 10**9)
        if policy.absence_ttl_ns:
            absent = seen.client.ask(Opcode.LOOKUP, 1, b"missing\0")
            assert struct.unpack_from("=QQQ", absent) == (0, 0, policy.absence_ttl_ns // 10**9)
        else:
            assert refused(seen.client.ask, Opcode.LOOKUP, 1, b"missing\0") == errno.ENOENT


def test_without_state_files_are_read_unopened(tmp_path: Path) -> None:
    with side(tmp_path, "image", FOREVER) as seen:
        client = seen.client
        node = client.lookup(client.root, b"file").node
        assert refused(client.open, node, 0) == errno.ENOSYS
        assert refused(client.opendir, client.root) == errno.ENOSYS
        body = struct.pack("=QQIIQI4x", 0, 2, 3, 0, 0, 0)
        assert client.ask(Opcode.READ, node.nodeid, body) == b"234"
        listed = struct.pack("=QQIIQI4x", 0, 0, 4096, 0, 0, 0)
        assert b"file" in client.ask(Opcode.READDIR, 1, listed)


def test_what_is_pending_is_fetched_and_answered_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with side(tmp_path) as seen:
        node = seen.client.lookup(seen.client.root, b"file").node
        opens = ObjectDirectory.open
        is_here = False

        def open_or_wait(contents: ObjectDirectory, name: Any) -> Any:
            if not is_here:
                raise Pending(name, 0, name.size)
            return opens(contents, name)

        monkeypatch.setattr(ObjectDirectory, "open", open_or_wait)
        raw = request(Opcode.OPEN, bytes(8), unique=40, nodeid=node.nodeid)
        assert seen.ask(raw) is None
        pending, done = seen.fetching.pop()
        assert pending.size == 10
        done(None)  # it is not: it was evicted at once
        assert not seen.late
        is_here = True
        seen.fetching.pop()[1](None)
        [(unique, answer)] = seen.late
        assert unique == 40
        assert len(answer) == 16
        seen.late.clear()
        is_here = False
        assert seen.ask(request(Opcode.OPEN, bytes(8), unique=42, nodeid=node.nodeid)) is None
        seen.fetching.pop()[1](OSError("no network"))
        assert seen.late == [(42, errno.EIO)]
        assert [str(fault) for fault in seen.faults] == ["no network"]


def test_only_who_is_being_killed_stops_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(_contents: ObjectDirectory, name: Any) -> Any:
        raise Pending(name, 0, name.size)

    monkeypatch.setattr(ObjectDirectory, "open", wait)
    with side(tmp_path) as seen:
        node = seen.client.lookup(seen.client.root, b"file").node
        seen.ask(request(Opcode.OPEN, bytes(8), unique=40, nodeid=node.nodeid, pid=99))
        interrupt = request(Opcode.INTERRUPT, struct.pack("=Q", 40), unique=41)
        assert seen.ask(interrupt) is None
        assert seen.late == []
        seen.killed.add(99)
        seen.ask(interrupt)
        assert seen.late == [(40, errno.EINTR)]
        seen.fetching.pop()[1](None)
        assert len(seen.late) == 1


def test_content_is_the_transports_to_read(tmp_path: Path) -> None:
    with side(tmp_path) as seen:
        file = seen.client.open(seen.client.lookup(seen.client.root, b"file").node, 0)
        body = struct.pack("=QQIIQI4x", file.handle, 4, 100, 0, 0, 0)
        raw = request(Opcode.READ, body, unique=6, nodeid=file.node.nodeid)
        served = seen.server.serve(memoryview(raw))
        assert served is not None
        answer = served[1]
        assert isinstance(answer, FileRange)
        file.close()  # the answer still has it
        buffers = [memoryview(bytearray(2)), memoryview(bytearray(98))]
        assert answer.read_into(buffers) == 6
        assert b"".join(buffers)[:6] == b"456789"


def test_a_write_may_come_in_pieces(tmp_path: Path) -> None:
    with side(tmp_path) as seen:
        file = seen.client.open(seen.client.lookup(seen.client.root, b"file").node, 1)
        head = struct.pack("=QQIIQI4x", file.handle, 8, 5, 0, 0, 0)
        raw = bytearray(request(Opcode.WRITE, head, nodeid=file.node.nodeid))
        raw[:4] = struct.pack("=I", len(raw) + 5)
        pieces = [memoryview(b"ab"), memoryview(b"cde")]
        assert seen.server.serve(memoryview(raw), None, pieces) == (2, struct.pack("=II", 5, 0))
        short = request(Opcode.WRITE, head + b"abc", nodeid=file.node.nodeid)
        assert seen.server.serve(memoryview(short)) == (2, errno.EINVAL)
        file.close()
        reader = seen.client.open(file.node, 0)
        assert reader.read(100, 0) == b"01234567abcde"
        reader.close()


def test_each_change_is_told_of_even_if_it_fails(tmp_path: Path) -> None:
    with side(tmp_path) as seen:
        client = seen.client
        file = client.lookup(client.root, b"file").node
        client.mkdir(client.root, b"new", 0o755, USER)
        refused(client.mkdir, client.root, b"new", 0o755, USER)
        client.rename(client.root, b"file", client.root, b"moved", 0)
        client.setattr(file, AttrChange(mode=0o600))
        client.open(file, 0).close()
        client.open(file, 1).close()
        nodeid = file.nodeid
        expected = [
            ((1,), ((1, b"new"),)),
            ((1,), ((1, b"new"),)),
            ((1, 1), ((1, b"file"), (1, b"moved"))),
            ((nodeid,), ()),
            ((nodeid,), ()),
        ]
        assert seen.cache.open == seen.cache.over == expected


def test_set_ids_are_taken_where_the_kernel_says_so(tmp_path: Path) -> None:
    with side(tmp_path) as seen:
        client = seen.client
        node = client.lookup(client.root, b"file").node
        client.setattr(node, AttrChange(mode=0o6755))
        file = client.open(node, 1)
        kill = 1 << 2
        head = struct.pack("=QQIIQI4x", file.handle, 0, 1, 0, 0, 0)
        client.ask(Opcode.WRITE, node.nodeid, head + b"x")
        assert client.getattr(node).mode & 0o7777 == 0o6755
        head = struct.pack("=QQIIQI4x", file.handle, 0, 1, kill, 0, 0)
        client.ask(Opcode.WRITE, node.nodeid, head + b"x")
        assert client.getattr(node).mode & 0o7777 == 0o755
        client.setattr(node, AttrChange(mode=0o6745))
        valid = AttrField.SIZE | AttrField.KILL_SUIDGID
        body = struct.pack("=I4xQQ64x", valid, 0, 3)
        client.ask(Opcode.SETATTR, node.nodeid, body)
        assert client.getattr(node).mode & 0o7777 == 0o2745  # no group execution: locking
        file.close()


def test_names_that_lead_elsewhere_are_refused(tmp_path: Path) -> None:
    with side(tmp_path) as seen:
        for name in (b".", b"..", b"dir/sub"):
            assert refused(seen.client.lookup, seen.client.root, name) == errno.EINVAL
            assert refused(seen.client.mkdir, seen.client.root, name, 0, USER) == errno.EINVAL
            assert refused(seen.client.unlink, seen.client.root, name) == errno.EINVAL


def test_a_kernel_that_is_too_old_is_refused(tmp_path: Path) -> None:
    with side(tmp_path) as seen:
        old = struct.pack("=IIII", 7, 30, 0, 0)
        assert refused(seen.client.ask, Opcode.INIT, 0, old) == errno.EPROTO


def test_a_new_init_forgets_everything(tmp_path: Path) -> None:
    with side(tmp_path) as seen:
        node = seen.client.lookup(seen.client.root, b"file").node
        file = seen.client.open(node, 0)
        FuseClient(seen.ask)
        assert refused(seen.client.getattr, node) == errno.ESTALE
        assert refused(file.read, 1, 0) == errno.EBADF
