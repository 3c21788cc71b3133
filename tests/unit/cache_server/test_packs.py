from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from cache_server.packs import PACK_SIZE, Packs
from snapshotter.errors import CorruptError


def test_takers_get_packs_of_their_own_and_kept_ones_again(tmp_path: Path) -> None:
    packs = Packs(tmp_path, {})
    first, second = packs.take(), packs.take()
    assert (first.name, second.name) == ("000001.pack", "000002.pack")
    assert (first.append(b"abc"), first.append(b"de"), second.append(b"f")) == (0, 3, 0)
    first.sync()
    packs.keep(first)
    again = packs.take()
    assert (again.name, again.append(b"g")) == ("000001.pack", 5)
    again.sync()
    packs.keep(again)
    assert packs.read("000001.pack", 3, 3) == b"deg"
    packs.drop(second, may_be_committed=False)
    packs.close()


def test_dropping_cuts_what_was_not_committed(tmp_path: Path) -> None:
    packs = Packs(tmp_path, {})
    pack = packs.take()
    pack.append(b"kept")
    pack.sync()
    packs.keep(pack)
    pack = packs.take()
    pack.append(b"x" * (3 << 20))
    packs.drop(pack, may_be_committed=False)
    assert (tmp_path / "000001.pack").read_bytes() == b"kept"
    pack = packs.take()
    assert (pack.name, pack.append(b"more")) == ("000001.pack", 4)
    packs.drop(pack, may_be_committed=False)
    packs.close()


def test_a_pack_that_may_be_committed_is_left_alone(tmp_path: Path) -> None:
    packs = Packs(tmp_path, {})
    pack = packs.take()
    pack.append(b"perhaps")
    pack.sync()
    packs.drop(pack, may_be_committed=True)
    assert (tmp_path / "000001.pack").read_bytes() == b"perhaps"
    other = packs.take()
    assert other.name == "000002.pack"
    packs.drop(other, may_be_committed=False)
    packs.close()


def test_full_packs_get_no_more(tmp_path: Path) -> None:
    with (tmp_path / "000004.pack").open("wb") as file:
        file.truncate(PACK_SIZE)
    packs = Packs(tmp_path, {"000004.pack": PACK_SIZE})
    pack = packs.take()
    assert pack.name == "000005.pack"
    packs.drop(pack, may_be_committed=False)
    packs.close()


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packs = Packs(tmp_path, {})
    pack = packs.take()
    pwrite = os.pwrite
    monkeypatch.setattr(
        "cache_server.packs.os.pwrite",
        lambda descriptor, data, offset: pwrite(descriptor, data[:7], offset),
    )
    pack.append(bytes(range(100)))
    pack.sync()
    packs.keep(pack)
    assert packs.read(pack.name, 0, 100) == bytes(range(100))
    packs.close()


def test_reads_beyond_the_end_are_refused(tmp_path: Path) -> None:
    (tmp_path / "000001.pack").write_bytes(b"12345")
    packs = Packs(tmp_path, {"000001.pack": 5})
    with pytest.raises(CorruptError, match="000001"):
        packs.read("000001.pack", 3, 3)
    with pytest.raises(CorruptError, match="000001"):
        packs.read("000001.pack", -3, 3)
    with pytest.raises(CorruptError, match="000009"):
        packs.read("000009.pack", 0, 1)
    packs.close()


def test_sending_goes_on_after_short_sends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "000001.pack").write_bytes(bytes(range(100)))
    packs = Packs(tmp_path, {"000001.pack": 100})
    sendfile = os.sendfile
    monkeypatch.setattr(
        "cache_server.packs.os.sendfile",
        lambda target, source, offset, count: sendfile(target, source, offset, min(count, 7)),
    )
    sender, receiver = socket.socketpair()
    with sender, receiver:
        packs.check("000001.pack", 10, 90)
        packs.send("000001.pack", 10, 90, sender.fileno())
        assert receiver.recv(1000) == bytes(range(10, 100))
    packs.close()


def test_sending_beyond_the_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "000001.pack").write_bytes(b"12345")
    packs = Packs(tmp_path, {"000001.pack": 5})
    sender, receiver = socket.socketpair()
    with sender, receiver:
        with pytest.raises(CorruptError, match="000001"):
            packs.check("000001.pack", 3, 3)
        with pytest.raises(CorruptError, match="2 of 3 bytes"):
            packs.send("000001.pack", 3, 3, sender.fileno())
    packs.close()
