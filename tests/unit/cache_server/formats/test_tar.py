from __future__ import annotations

import io
import random
import stat
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_server.formats.tar import read_tar
from snapshotter.errors import CorruptError, InvalidInputError
from snapshotter.names import CHUNK_SIZE
from snapshotter.projection.tree import EntryKind, LayerEntry
from tests.unit.cache_server.formats.tar_blocks import (
    END,
    header,
    make_acl,
    member,
    padded,
    pax,
    read,
    read_one,
)

CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")
NO_ID = 0xFFFF_FFFF
ACL = make_acl((1, 6, NO_ID), (2, 4, 1000), (4, 4, NO_ID), (0x10, 4, NO_ID), (0x20, 4, NO_ID))
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def stdlib_tar(form: int, *, long_names: bool = True) -> bytes:
    """An archive of every ordinary kind of entry, written by the standard library."""
    buffer = io.BytesIO()
    long_part = "p" * 90
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:

        def add(name: str, data: bytes = b"", **attributes: object) -> None:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info.mtime = 1_700_000_000
            for key, value in attributes.items():
                setattr(info, key, value)
            tar.addfile(info, io.BytesIO(data))

        add("./", type=tarfile.DIRTYPE, mode=0o755)
        add("./etc", type=tarfile.DIRTYPE, mode=0o1777, uid=7, gid=8)
        add("etc/passwd", b"root:x:0:0", mode=0o4640, uid=1000, gid=2000)
        add("etc/empty", mode=0o600)
        add("etc/link", type=tarfile.SYMTYPE, linkname="../x/y", mode=0o777)
        add("etc/hard", type=tarfile.LNKTYPE, linkname="./etc/passwd")
        add("dev/null", type=tarfile.CHRTYPE, devmajor=1, devminor=3, mode=0o666)
        add("dev/disk", type=tarfile.BLKTYPE, devmajor=259, devminor=70_000, mode=0o660)
        add("dev/pipe", type=tarfile.FIFOTYPE, mode=0o600)
        add("odd", bytes(range(256)) * 5)
        if long_names:
            add(f"{long_part}/{long_part}/file", b"far")
            if form != tarfile.USTAR_FORMAT:
                add("to", type=tarfile.SYMTYPE, linkname="t" * 300)
                add("n" * 250, b"long")
    return buffer.getvalue()


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS.keys())
def test_reads_what_the_standard_library_writes(form: int) -> None:
    found = {entry.path: (entry, content) for entry, content in read(stdlib_tar(form))}

    def node(path: bytes) -> LayerEntry:
        return found[path][0]

    assert node(b"").mode == stat.S_IFDIR | 0o755
    etc = node(b"etc")
    assert (etc.mode, etc.uid, etc.gid) == (stat.S_IFDIR | 0o1777, 7, 8)
    passwd, content = found[b"etc/passwd"]
    assert content == b"root:x:0:0"
    assert (passwd.mode, passwd.uid, passwd.gid) == (stat.S_IFREG | 0o4640, 1000, 2000)
    assert (passwd.size, passwd.mtime_ns) == (10, 1_700_000_000_000_000_000)
    assert (node(b"etc/empty").size, found[b"etc/empty"][1]) == (0, b"")
    assert node(b"etc/link").mode == stat.S_IFLNK | 0o777
    assert node(b"etc/link").target == b"../x/y"
    hard = node(b"etc/hard")
    assert (hard.kind, hard.target) == (EntryKind.HARD_LINK, b"etc/passwd")
    assert node(b"dev/null").mode == stat.S_IFCHR | 0o666
    assert node(b"dev/null").rdev == 0x103
    assert node(b"dev/disk").mode == stat.S_IFBLK | 0o660
    assert node(b"dev/disk").rdev == 0x70 | 259 << 8 | (70_000 & ~0xFF) << 12
    assert node(b"dev/pipe").mode == stat.S_IFIFO | 0o600
    assert found[b"odd"][1] == bytes(range(256)) * 5
    assert found[b"p" * 90 + b"/" + b"p" * 90 + b"/file"][1] == b"far"
    if form != tarfile.USTAR_FORMAT:
        assert node(b"to").target == b"t" * 300
        assert found[b"n" * 250][1] == b"long"


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS.keys())
def test_is_the_same_however_the_stream_is_split(form: int) -> None:
    archive = stdlib_tar(form)
    whole = read(archive)
    assert read(*(archive[at : at + 1] for at in range(len(archive)))) == whole
    for at in range(0, len(archive) + 1, 7):
        assert read(archive[:at], b"", archive[at:]) == whole


def test_content_comes_in_whole_chunks() -> None:
    content = random.Random(1).randbytes(2 * CHUNK_SIZE + 5)
    archive = member(b"big", content) + END
    blocks = [archive[at : at + 100_000] for at in range(0, len(archive), 100_000)]
    pieces = [bytes(event) for event in read_tar(blocks) if not isinstance(event, LayerEntry)]
    assert [len(piece) for piece in pieces] == [CHUNK_SIZE, CHUNK_SIZE, 5]
    assert b"".join(pieces) == content


def test_consumes_what_follows_the_end() -> None:
    blocks = iter([member(b"a", b"1"), END, b"x" * 5000, b"y"])
    assert len(list(read_tar(blocks))) == 2
    assert next(blocks, None) is None


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        (b"a/b", b"a/b"),
        (b"./a/b", b"a/b"),
        (b"/a/b", b"a/b"),
        (b"a//b/./c", b"a/b/c"),
        (b".", b""),
        (b"./", b""),
        (b"/", b""),
        (b"a/b/", b"a/b"),
        (b"\xff\xfe/\n", b"\xff\xfe/\n"),
        (b"a..b/...", b"a..b/..."),
        (b".hidden/..x", b".hidden/..x"),
    ],
)
def test_paths_are_normalised(raw: bytes, path: bytes) -> None:
    assert read_one(header(raw, kind=b"5"), END).path == path


def test_pax_records_win_over_fields() -> None:
    records = {
        b"path": b"p/\xc3\xa9" + b"x" * 200,
        b"uid": b"4294967290",
        b"gid": b"70000",
        b"mtime": b"12.000000345999",
        b"size": b"3",
        b"SCHILY.xattr.user.a": b"1\n\x002",
        b"SCHILY.xattr.user.empty": b"",
        b"SCHILY.xattr.security.capability": CAPABILITY,
        b"SCHILY.xattr.trusted.overlay.opaque": b"y",
        b"SCHILY.xattr.system.nfs4_acl": b"z",
        b"comment": b"no more",
    }
    ((entry, content),) = read(pax(records), header(b"short", size=0), padded(b"abc"), END)
    assert entry.path == b"p/\xc3\xa9" + b"x" * 200
    assert (entry.uid, entry.gid, entry.size, content) == (4_294_967_290, 70_000, 3, b"abc")
    assert entry.mtime_ns == 12_000_000_345
    assert entry.xattrs == {
        b"user.a": b"1\n\x002",
        b"user.empty": b"",
        b"security.capability": CAPABILITY,
    }


def test_acls_are_as_chmod_leaves_them() -> None:
    agreed = make_acl(
        (1, 7, NO_ID), (2, 4, 1000), (4, 4, NO_ID), (0x10, 5, NO_ID), (0x20, 1, NO_ID)
    )
    records = {b"SCHILY.xattr.system.posix_acl_access": ACL}
    file = read_one(pax(records), header(mode=b"0000751"), END)
    assert file.xattrs == {b"system.posix_acl_access": agreed}
    assert read_one(pax(records), header(kind=b"2", link=b"x"), END).xattrs == {}
    default = {b"SCHILY.xattr.system.posix_acl_default": ACL}
    assert read_one(pax(default), header(kind=b"5"), END).xattrs == {
        b"system.posix_acl_default": ACL
    }


@pytest.mark.parametrize(
    ("kind", "names"),
    [(b"0", 2), (b"5", 2), (b"1", 2), (b"2", 1), (b"3", 1), (b"6", 1)],
)
def test_user_xattrs_are_for_files_and_directories(kind: bytes, names: int) -> None:
    records = {b"SCHILY.xattr.user.a": b"1", b"SCHILY.xattr.security.b": b"2"}
    assert len(read_one(pax(records), header(kind=kind, link=b"x"), END).xattrs) == names


def test_pax_linkpath_wins_over_the_field() -> None:
    target = b"t/" * 120 + b"t"
    assert read_one(pax({b"linkpath": target}), header(kind=b"2", link=b"x"), END).target == target
    hard = read_one(pax({b"linkpath": b"./" + target}), header(kind=b"1", link=b"x"), END)
    assert hard.target == target


@pytest.mark.parametrize(
    ("value", "time_ns"),
    [
        (b"0", 0),
        (b"-1.5", -1_500_000_000),
        (b"+5", 5_000_000_000),
        (b"-0.000000001", -1),
        (b"1.", 1_000_000_000),
        (b"99999999999", 0),
        (b"1700000000.123456789", 1_700_000_000_123_456_789),
    ],
)
def test_pax_times_have_fractions_and_signs(value: bytes, time_ns: int) -> None:
    assert read_one(pax({b"mtime": value}), header(), END).mtime_ns == time_ns


def test_extended_headers_hold_for_one_entry() -> None:
    first, second = read(pax({b"uid": b"5"}), header(b"a"), header(b"b"), END)
    assert (first[0].uid, second[0].uid) == (5, 0)


def test_a_pax_record_without_value_says_nothing() -> None:
    assert read_one(pax({b"path": b""}), header(b"a"), END).path == b"a"


def test_what_stands_before_a_global_header_is_not_about_the_next_entry() -> None:
    blocks = pax({b"uid": b"5"}), pax({b"comment": b"c"}, kind=b"g"), header(b"a"), END
    assert read_one(*blocks).uid == 0


def test_extended_headers_may_come_last() -> None:
    assert len(read(header(), pax({b"uid": b"5"}), END)) == 1


def test_empty_long_names_say_nothing() -> None:
    blocks = member(b"L", b"\0", kind=b"L"), member(b"K", b"", kind=b"K"), header(b"a"), END
    assert read_one(*blocks).path == b"a"


def test_no_owner_is_root() -> None:
    """chown(2) takes 2^32 - 1 for no change, and whoever unpacks is root."""
    assert read_one(pax({b"uid": b"4294967295"}), header(), END).uid == 0


def test_global_headers_say_nothing_about_entries() -> None:
    entry = read_one(pax({b"uid": b"9", b"comment": b"c"}, kind=b"g"), header(b"a"), END)
    assert (entry.path, entry.uid) == (b"a", 0)


def test_gnu_long_names_win_over_pax() -> None:
    name = b"d/" * 100 + b"name"
    blocks = (
        pax({b"path": b"other"}),
        member(b"././@LongLink", name + b"\0", kind=b"L"),
        member(b"././@LongLink", b"target\0", kind=b"K"),
    )
    entry = read_one(*blocks, header(b"x", kind=b"2", link=b"y", magic=b"ustar  \0"), END)
    assert (entry.path, entry.target) == (name, b"target")


def test_binary_numbers() -> None:
    entry = read_one(
        header(
            uid=b"\x80\0\0\0\x80\0\0\0",
            gid=b"\x80\0\0\0\0\x20\0\0",
            mtime=b"\xff" * 11 + b"\xfe",
            size=b"\x80" + bytes(11),
        ),
        END,
    )
    assert (entry.uid, entry.gid, entry.mtime_ns) == (1 << 31, 1 << 21, -2_000_000_000)


def test_numbers_may_have_blanks_and_be_absent() -> None:
    entry = read_one(header(mode=b"   755 ", uid=b"  12\0 \0", gid=b"", mtime=b"7 "), END)
    assert (entry.mode & 0o7777, entry.uid, entry.gid) == (0o755, 0o12, 0)
    assert entry.mtime_ns == 7_000_000_000


def test_only_ustar_has_a_prefix() -> None:
    assert read_one(header(b"b", prefix=b"a"), END).path == b"a/b"
    assert read_one(header(b"b", prefix=b"a", magic=b"ustar  \0"), END).path == b"b"
    assert read_one(header(b"b", prefix=b"a", magic=b""), END).path == b"b"


def test_old_archives_mark_directories_by_a_slash() -> None:
    assert read_one(header(b"d/", kind=b"\0", magic=b""), END).mode == stat.S_IFDIR | 0o644
    assert read_one(header(b"f", kind=b"\0", magic=b""), END).mode == stat.S_IFREG | 0o644


def test_signed_checksums_are_taken() -> None:
    block = header(b"\xff\xfe")
    total = sum(byte - 256 * (byte >= 128) for byte in block[:148] + b" " * 8 + block[156:])
    assert read_one(header(b"\xff\xfe", checksum=b"%06o\0 " % total), END).path == b"\xff\xfe"


def test_links_have_no_data_whatever_their_size() -> None:
    first, second = read(header(b"l", kind=b"1", link=b"a", size=600), member(b"b", b"x"), END)
    assert (first[0].size, second[1]) == (0, b"x")


def test_whiteouts() -> None:
    found = read(
        header(b"a/.wh.b"),
        header(b"./.wh.c"),
        member(b"a/.wh..wh..opq", b"data is skipped"),
        header(b".wh..wh..opq"),
        header(b".wh..wh.plnk", kind=b"5"),
        header(b".wh..wh.aufs", kind=b"1", link=b"x"),
        member(b".wh..wh.orph/x", b"z"),
        header(b"a/no.wh.b"),
        END,
    )
    assert [(entry.kind, entry.path) for entry, _ in found] == [
        (EntryKind.WHITEOUT, b"a/b"),
        (EntryKind.WHITEOUT, b"c"),
        (EntryKind.OPAQUE, b"a"),
        (EntryKind.OPAQUE, b""),
        (EntryKind.NODE, b"a/no.wh.b"),
    ]
    assert not any(content for _, content in found)


def test_archives_may_end_without_zero_blocks() -> None:
    assert read() == []
    assert read(END) == []
    assert read(bytes(512)) == []
    assert len(read(member(b"a", b"1"))) == 1


BAD_ENTRIES = {
    "parent part": header(b"a/../b"),
    "parent first": header(b"../b"),
    "parent last": header(b"a/.."),
    "empty name": header(b""),
    "long part": pax({b"path": b"x" * 256}) + header(),
    "long path": pax({b"path": b"ab/" * 6000}) + header(),
    "NUL in pax path": pax({b"path": b"a\0b"}) + header(),
    "NUL in pax linkpath": pax({b"linkpath": b"a\0b"}) + header(kind=b"2"),
    "empty symlink target": header(kind=b"2"),
    "long symlink target": pax({b"linkpath": b"x" * 4096}) + header(kind=b"2"),
    "hard link without target": header(kind=b"1"),
    "hard link outside": header(kind=b"1", link=b"../etc/passwd"),
    "root as a file": header(b"./."),
    "root as a hard link": header(b".", kind=b"1", link=b"a"),
    "whiteout of nothing": header(b"a/.wh."),
    "whiteout of the directory": header(b"a/.wh.."),
    "whiteout of the parent": header(b"a/.wh..."),
    "unknown type": header(kind=b"V"),
    "contiguous file": header(kind=b"7"),
    "bad device of a file": header(major=b"zzzz"),
    "bad size of a directory": header(kind=b"5", size=b"zzz"),
    "bad atime": pax({b"atime": b"x"}) + header(),
    "no file capabilities": pax({b"SCHILY.xattr.security.capability": b"1"}) + header(),
    "no ACL": pax({b"SCHILY.xattr.system.posix_acl_access": b"\2\0\0\0x"}) + header(),
    "default ACL of a file": pax({b"SCHILY.xattr.system.posix_acl_default": ACL}) + header(),
    "NUL in a pax key": pax({b"SCHILY.xattr.user.a\0b": b"1"}) + header(),
    "no octal digits": header(mode=b"00x0644"),
    "octal with 8": header(uid=b"0000008"),
    "octal with underscore": header(uid=b"0_1"),
    "octal with sign": header(uid=b"-1"),
    "negative size": header(size=b"\xff" * 12),
    "negative pax size": pax({b"size": b"-1"}) + header(),
    "huge pax size": pax({b"size": b"9" * 19}) + header(),
    "negative owner": header(uid=b"\xff" * 8),
    "owner beyond": pax({b"uid": b"4294967296"}) + header(),
    "huge group": pax({b"gid": b"99999999999"}) + header(),
    "pax number": pax({b"uid": b"0x1"}) + header(),
    "pax time": pax({b"mtime": b"1e5"}) + header(),
    "device major": header(kind=b"3", major=b"0010000", minor=b"0"),
    "device minor": header(kind=b"4", major=b"1", minor=b"4000000"),
    "long xattr name": pax({b"SCHILY.xattr.user." + b"n" * 255: b"v"}) + header(),
    "long xattr value": pax({b"SCHILY.xattr.user.n": b"v" * 65_537}) + header(),
    "long extension": header(kind=b"x", size=(1 << 20) + 1),
    "negative extension": header(kind=b"L", size=b"\xff" * 12),
}


@pytest.mark.parametrize("archive", BAD_ENTRIES.values(), ids=BAD_ENTRIES.keys())
def test_refuses_what_no_image_may_hold(archive: bytes) -> None:
    with pytest.raises(InvalidInputError):
        read(archive, END)


def test_refusals_name_the_entry() -> None:
    with pytest.raises(InvalidInputError, match=r"entry 'a/\.\./b'"):
        read(header(b"a/../b"), END)
    with pytest.raises(CorruptError, match="content of 'victim'"):
        read(header(b"victim", size=5))


DAMAGED = {
    "short header": header()[:100],
    "checksum": header(checksum=b"000001\0 "),
    "zero block inside": bytes(512) + header(),
    "no content": header(size=600),
    "half the content": header(size=600) + bytes(512),
    "no padding": header(size=600) + bytes(600),
    "pax cut": pax({b"a": b"b"})[:600],
    "pax length zero": member(b"x", b"0 a=b\n", kind=b"x") + header(),
    "pax length too long": member(b"x", b"9 a=b\n", kind=b"x") + header(),
    "pax length sign": member(b"x", b"+6 a=b\n", kind=b"x") + header(),
    "pax without newline": member(b"x", b"6 a=bc", kind=b"x") + header(),
    "pax without equals": member(b"x", b"6 abc\n", kind=b"x") + header(),
    "pax without key": member(b"x", b"5 =b\n", kind=b"x") + header(),
    "pax without blank": member(b"x", b"123456", kind=b"x") + header(),
    "pax length huge": member(b"x", b"9" * 5000, kind=b"x") + header(),
}


@pytest.mark.parametrize("archive", DAMAGED.values(), ids=DAMAGED.keys())
def test_refuses_damage(archive: bytes) -> None:
    with pytest.raises(CorruptError):
        read(archive)


def test_every_truncation_is_refused_or_ends_between_entries() -> None:
    archive = member(b"first", b"1" * 600) + pax({b"uid": b"1"}) + member(b"second", b"2")
    # An extended header without its entry says nothing: Go's reader takes it too.
    boundaries = {0, 512 + 1024, 512 + 2048, len(archive)}
    for length in range(len(archive) + 1):
        if length in boundaries:
            read(archive[:length])
        else:
            with pytest.raises(CorruptError):
                read(archive[:length])


ARCHIVE = stdlib_tar(tarfile.PAX_FORMAT)


@given(st.data())
def test_damaged_archives_only_raise_errors_of_ours(data: st.DataObject) -> None:
    """Whatever bytes change: entries or CorruptError or InvalidInputError, nothing else."""
    archive = bytearray(ARCHIVE)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(archive) - 600))
        block = at - at % 512
        archive[at] = data.draw(st.integers(0, 255))
        # With a right checksum the damage reaches the fields.
        stated = b"%06o\0 " % (
            sum(archive[block : block + 512]) + 256 - sum(archive[block + 148 : block + 156])
        )
        if archive[block + 257 : block + 262] == b"ustar":
            archive[block + 148 : block + 156] = stated
    try:
        for entry, content in read(bytes(archive)):
            assert len(content) == entry.size
    except (CorruptError, InvalidInputError):
        pass
