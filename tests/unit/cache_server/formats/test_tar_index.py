import io
import tarfile
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_server.formats.tar_index import TarIndex, read_index
from snapshotter.errors import (
    CorruptError,
    InvalidInputError,
    NotFoundError,
    SnapshotterError,
    UnsupportedError,
)
from tests.unit.cache_server.formats.tar_blocks import END, header, member, pax


def index_of(data: bytes) -> TarIndex:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        return read_index(file.fileno())


def content(data: bytes, path: bytes) -> bytes:
    extent = index_of(data).find(path)
    return data[extent.offset : extent.offset + extent.size]


def test_finds_content_by_path_and_the_last_member_of_a_name_counts() -> None:
    data = member(b"./a", b"1") + member(b"b/c", b"22") + member(b"a", b"333") + END
    assert content(data, b"a") == b"333"
    assert content(data, b"b/c") == b"22"


@pytest.mark.parametrize("format_", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_and_targets(format_: int) -> None:
    long, link = "d/" * 80 + "f", "e/" * 60 + "l"
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format_) as tar:
        info = tarfile.TarInfo(long)
        info.size = 3
        tar.addfile(info, io.BytesIO(b"abc"))
        info = tarfile.TarInfo(link)
        info.type, info.linkname = tarfile.SYMTYPE, "../" * 60 + long
        tar.addfile(info)
    assert content(buffer.getvalue(), long.encode()) == b"abc"
    assert content(buffer.getvalue(), link.encode()) == b"abc"


@pytest.mark.parametrize(
    ("kind", "target"),
    [(b"2", b"../y/f"), (b"2", b"/y/f"), (b"2", b"./../x/../y/f"), (b"1", b"y/f")],
)
def test_links_mean_files_of_the_archive(kind: bytes, target: bytes) -> None:
    data = member(b"y/f", b"hello") + header(b"x/l", kind=kind, link=target) + END
    assert content(data, b"x/l") == b"hello"


def test_links_in_a_circle_or_out_of_the_archive_are_not_found() -> None:
    links = header(b"a", kind=b"2", link=b"b") + header(b"b", kind=b"2", link=b"a")
    out = header(b"c", kind=b"2", link=b"../../../../etc/passwd")
    for name in (b"a", b"c", b"d"):
        with pytest.raises(NotFoundError, match=name.decode()):
            index_of(links + out + END).find(name)


def test_pax_size_is_that_of_the_file_and_not_of_the_next_header() -> None:
    data = pax({b"size": b"5"}) + header(b"a", size=0) + b"hello".ljust(512, b"\0")
    data += pax({b"comment": b"x"}) + member(b"b", b"next") + END
    assert content(data, b"a") == b"hello"
    assert content(data, b"b") == b"next"


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (header(b"a", size=10), CorruptError),
        (member(b"a", bytes(600))[:700], CorruptError),
        (member(b"a", b"1") + b"short", CorruptError),
        (header(b"a", checksum=b"000001\0 "), CorruptError),
        (header(b"../a"), InvalidInputError),
        (header(b"a", size=b"x"), InvalidInputError),
        (header(b"a", size=b"\xff" * 12), CorruptError),
        (header(b"x", kind=b"x", size=2 << 20) + bytes(3 << 20), InvalidInputError),
        (header(b"a", kind=b"S"), UnsupportedError),
        (b"\x28\xb5\x2f\xfd" + bytes(508), UnsupportedError),
        (b"\x1f\x8b" + bytes(510), UnsupportedError),
    ],
)
def test_refuses(data: bytes, kind: type[SnapshotterError]) -> None:
    with pytest.raises(kind):
        index_of(data)


def test_end_may_be_missing_where_all_content_is_there() -> None:
    assert content(member(b"a", b"1")[:700], b"a") == b"1"


def test_members_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cache_server.formats.tar_index.MAX_MEMBERS", 3)
    index_of(header(b"a") * 3 + END)
    with pytest.raises(InvalidInputError, match="3 members"):
        index_of(header(b"a") * 4 + END)


SEED = (
    member(b"index.json", b"{}" * 300)
    + pax({b"path": b"long", b"size": b"3"})
    + member(b"x", b"abc")
    + header(b"l", kind=b"2", link=b"long")
    + END
)


@given(st.lists(st.tuples(st.integers(0, len(SEED) - 1), st.integers(0, 255)), max_size=8))
def test_every_extent_lies_within_the_file_whatever_its_bytes(
    changes: list[tuple[int, int]],
) -> None:
    data = bytearray(SEED)
    for at, value in changes:
        data[at] = value
    try:
        index = index_of(bytes(data))
    except SnapshotterError:
        return
    for extent in index.files.values():
        assert 0 <= extent.offset <= extent.offset + extent.size <= len(data)


def test_only_headers_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    size = 1 << 40
    with path.open("wb") as file:
        file.write(header(b"big", size=b"\x80" + size.to_bytes(11, "big")))
        file.seek(size, 1)
        file.write(member(b"small", b"here") + END)
    with path.open("rb") as file:
        extent = read_index(file.fileno()).find(b"small")
        file.seek(extent.offset)
        assert file.read(extent.size) == b"here"
