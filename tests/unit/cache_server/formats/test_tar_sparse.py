from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from cache_server.formats.tar import read_tar
from cache_server.formats.tar_sparse import ZERO_CHUNK
from snapshotter.errors import CorruptError, InvalidInputError
from snapshotter.names import CHUNK_SIZE
from snapshotter.projection.tree import LayerEntry
from tests.unit.cache_server.formats.tar_blocks import END, header, padded, pax, pax_record, read

FORMATS = {
    "old GNU": ["--format=gnu"],
    "pax 0.0": ["--format=posix", "--sparse-version=0.0"],
    "pax 0.1": ["--format=posix", "--sparse-version=0.1"],
    "pax 1.0": ["--format=posix", "--sparse-version=1.0"],
}
GNU = b"ustar  \0"


def holed(*parts: tuple[int, int], size: int) -> bytes:
    """A file of zeros with noise at these (offset, length)."""
    content = bytearray(size)
    for offset, length in parts:
        content[offset : offset + length] = random.Random(offset).randbytes(length)
    return bytes(content)


FILES = {
    "hole first": holed((3 << 20, 5000), size=(3 << 20) + 5000),
    "hole last": holed((0, 70_000), size=5 << 20),
    "hole within": holed((0, 512), ((1 << 20) - 512, 1024), (4 << 20, 1), size=(4 << 20) + 1),
    "only a hole": bytes(3 << 20),
    "many regions": holed(*((at << 13, 1024) for at in range(300)), size=300 << 13),
    "no hole": holed((0, 99_999), size=99_999),
}


def write_with_holes(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        for at in range(0, len(content), 512):
            block = content[at : at + 512]
            if any(block):
                file.seek(at)
                file.write(block)
        file.truncate(len(content))


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS.keys())
def test_reads_what_gnu_tar_writes(tmp_path: Path, options: list[str]) -> None:
    for name, content in FILES.items():
        write_with_holes(tmp_path / name, content)
    command = ["tar", "--create", "--sparse", "--hole-detection=raw", *options, *FILES]
    archive = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True).stdout
    assert len(archive) < sum(map(len, FILES.values())) // 2
    found = {entry.path.decode(): (entry.size, content) for entry, content in read(archive)}
    assert found == {name: (len(content), content) for name, content in FILES.items()}
    assert read(*(archive[at : at + 777] for at in range(0, len(archive), 777))) == read(archive)


def gnu_header(*regions: tuple[int, int], size: int, stored: int, extended: bool = False) -> bytes:
    """An old GNU header of at most four regions."""
    block = bytearray(header(b"s", kind=b"S", size=stored, magic=GNU))
    for at, (offset, length) in enumerate(regions):
        block[386 + 24 * at : 410 + 24 * at] = b"".join(
            b"\x80" + number.to_bytes(11) for number in (offset, length)
        )
    block[482] = extended
    block[483:495] = b"\x80" + size.to_bytes(11)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def test_holes_of_a_tebibyte_cost_no_bytes() -> None:
    size = 1 << 40
    chunks = holes = 0
    last = b""
    for event in read_tar([gnu_header((size - 3, 3), size=size, stored=3), padded(b"end"), END]):
        if isinstance(event, LayerEntry):
            assert event.size == size
        else:
            chunks += 1
            holes += event is ZERO_CHUNK
            last = bytes(event)
        if chunks == 1000:
            break
    assert holes == chunks == 1000
    assert last == bytes(CHUNK_SIZE)


def test_a_file_of_holes_alone() -> None:
    ((entry, content),) = read(gnu_header(size=1000, stored=0), END)
    assert (entry.size, content) == (1000, bytes(1000))


def test_markers_may_be_sparse() -> None:
    archive = pax(
        {
            b"GNU.sparse.map": b"0,3",
            b"GNU.sparse.size": b"9",
            b"GNU.sparse.numblocks": b"1",
        }
    )
    assert read(archive, header(b".wh.a", size=3), padded(b"abc"), header(b"b"), END)[1][1] == b""


def test_maps_without_version_hold_in_any_order_of_their_other_records() -> None:
    records = (
        pax_record(b"GNU.sparse.size", b"8")
        + pax_record(b"GNU.sparse.numblocks", b"2")
        + b"".join(
            pax_record(b"GNU.sparse." + key, value)
            for key, value in [
                (b"offset", b"1"), (b"numbytes", b"2"), (b"offset", b"7"), (b"numbytes", b"1"),
            ]
        )
    )  # fmt: skip
    blocks = header(b"x", kind=b"x", size=len(records)), padded(records)
    ((_, content),) = read(*blocks, header(b"s", size=3), padded(b"abc"), END)
    assert content == b"\0ab\0\0\0\0c"


def test_unknown_versions_are_plain_files() -> None:
    records = {b"GNU.sparse.major": b"2", b"GNU.sparse.minor": b"0"}
    assert read(pax(records), header(b"s", size=3), padded(b"abc"), END)[0][1] == b"abc"


def version_1(text: bytes, *, size: bytes = b"9", data: bytes = b"abc") -> bytes:
    stored = padded(text) + data
    records = {
        b"GNU.sparse.major": b"1",
        b"GNU.sparse.minor": b"0",
        b"GNU.sparse.name": b"name",
        b"GNU.sparse.realsize": size,
    }
    return pax(records) + header(b"GNUSparseFile.0/name", size=len(stored)) + padded(stored)


def pax_map(text: bytes, size: bytes = b"9", **more: bytes) -> bytes:
    count = b"%d" % (text.count(b",") // 2 + 1)
    records = {b"GNU.sparse.map": text, b"GNU.sparse.size": size, b"GNU.sparse.numblocks": count}
    records |= {b"GNU.sparse." + key.encode(): value for key, value in more.items()}
    return pax(records) + header(b"s", size=3) + padded(b"abc")


def test_version_1() -> None:
    ((entry, content),) = read(version_1(b"2\n0\n1\n5\n2\n"), END)
    assert (entry.path, content) == (b"name", b"a\0\0\0\0bc\0\0")


BAD = {
    "beyond the end": pax_map(b"7,3"),
    "overlapping": pax_map(b"0,2,1,1"),
    "out of order": pax_map(b"5,2,0,1"),
    "less than is stored": pax_map(b"0,2"),
    "more than is stored": pax_map(b"0,4"),
    "odd": pax_map(b"0,3,9"),
    "not numbers": pax_map(b"0,x"),
    "negative": pax_map(b"-1,3"),
    "huge": pax_map(b"9223372036854775807,3"),
    "negative size": pax_map(b"0,3", size=b"-9"),
    "huge size": pax_map(b"0,3", size=b"9" * 19),
    "another count": pax_map(b"0,3", numblocks=b"2"),
    "without count": pax({b"GNU.sparse.map": b"0,0", b"GNU.sparse.size": b"9"}) + header(),
    "of a directory": pax({b"GNU.sparse.map": b"0,3"}) + header(kind=b"5"),
    "parts out of place": pax({b"GNU.sparse.numbytes": b"1"}) + header(),
    "version 1 without map": version_1(b""),
    "version 1 with a short map": version_1(b"2\n0\n3\n"),
    "version 1 with a long line": version_1(b"1" * 2000 + b"\n"),
    "version 1 with a huge count": version_1(b"999999999\n"),
    "version 1 with letters": version_1(b"a\n"),
    "GNU beyond the end": gnu_header((7, 3), size=9, stored=3) + padded(b"abc"),
    "GNU with less than is stored": gnu_header((0, 2), size=9, stored=3) + padded(b"abc"),
    "GNU negative size": gnu_header((0, 3), size=(1 << 87) - 1, stored=3) + padded(b"abc"),
}


@pytest.mark.parametrize("archive", BAD.values(), ids=BAD.keys())
def test_refuses_illegal_maps(archive: bytes) -> None:
    with pytest.raises(InvalidInputError):
        read(archive, END)


DAMAGED = {
    "map cut": gnu_header((0, 3), size=9, stored=3, extended=True),
    "data cut": gnu_header((0, 3), size=9, stored=3) + b"ab",
    "version 1 map cut": version_1(b"200\n" + b"0\n" * 400)[: 512 * 4 + 100],
}


@pytest.mark.parametrize("archive", DAMAGED.values(), ids=DAMAGED.keys())
def test_refuses_damage(archive: bytes) -> None:
    with pytest.raises(CorruptError):
        read(archive)
