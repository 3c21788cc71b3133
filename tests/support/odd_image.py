"""An image of as many odd things as containerd takes: what it shows is what must be seen.

Where containerd differs on purpose from us (docs/decisions) an image of ours can differ too; such
things are left out here.
"""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import zstandard

from tests.support.debian_image import LocalImage
from tests.support.images import (
    Entry,
    Image,
    Layer,
    device,
    directory,
    fifo,
    file,
    hard_link,
    opaque,
    symlink,
    tar_bytes,
    whiteout,
    write_layout,
)
from tests.unit.cache_server.formats.tar_blocks import END, header, make_acl, member, padded, pax

_NO_ID = 0xFFFF_FFFF
_CAPABILITY = struct.pack("<IIIII", 0x02000001, 1 << 13, 0, 0, 0)
_ACL = make_acl(
    (1, 6, _NO_ID), (2, 4, 1234), (4, 4, _NO_ID), (8, 5, 99), (0x10, 5, _NO_ID), (0x20, 0, _NO_ID)
)
_DEFAULT_ACL = make_acl(
    (1, 7, _NO_ID), (2, 5, 1234), (4, 5, _NO_ID), (0x10, 5, _NO_ID), (0x20, 5, _NO_ID)
)
_SKIPPABLE = b"\x5a\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"12345"
_S = 10**9

UNTOLD_TIMES = frozenset(
    b"." if not path else path.encode()
    for path in (
        "", "made", "made/by", "made/by/nobody", "plain", "over-link", "over-file", "markers",
        "markers/under", "markers/under/nothing", "markers/was-file", "opaque", "target", "tree",
        "tree/replaced", "gone", "pre",
    )
)  # fmt: skip
"""Directories of which the topmost layer that has them does not tell the time."""


def odd_image(place: Path) -> tuple[LocalImage, Image]:
    """Writes the image below ``place``."""
    first = tar_bytes(_first())[:-1024].rstrip(b"\0")
    first += bytes(-len(first) % 512) + _raw()
    members = b"".join(gzip.compress(first[at : at + 9999]) for at in range(0, len(first), 9999))
    second, third, fourth = tar_bytes(_second()), tar_bytes(_third()), tar_bytes(_fourth())
    compress = zstandard.ZstdCompressor(level=3).compress
    frames = compress(second[:700]) + _SKIPPABLE + compress(second[700:]) + _SKIPPABLE
    layers = [
        Layer(first, blob=members),
        Layer(b"", compression="none"),
        Layer(second, blob=frames, compression="zstd"),
        Layer(bytes(1024)),
        Layer(third, compression="none"),
        Layer(fourth),
    ]
    image = Image(layers)
    write_layout(place, {"odd": image})
    return LocalImage(place, "odd"), image


def _first() -> list[Entry]:
    return [
        directory("."),
        file("./dot/slash", b"1"),
        directory("./dot"),
        file("/from/root", b"2"),
        directory("from"),
        file("made/by/nobody/file", b"parents are made"),
        *_names(),
        *_kinds(),
        *_links(),
        *_twice(),
        *_lower(),
    ]


def _names() -> list[Entry]:
    return [
        directory("names"),
        file("names/" + "n" * 255, b"longest"),
        file(b"names/\xff\xfe", b"not UTF-8"),
        file("names/new\nline\ttab", b""),
        file("names/..dots..", b""),
        file("names/.wh", b"no whiteout"),
        file("names/a.wh.b", b"no whiteout"),
        symlink("names/longest-target", "t/" * 2047 + "t"),
        symlink(b"names/odd-target", b"\xff\n"),
    ]


def _kinds() -> list[Entry]:
    return [
        directory("kinds", mode=0o1777, uid=4_294_967_294, gid=3_000_000_000),
        file("kinds/setuid", b"x", mode=0o4711),
        file("kinds/setgid", b"x", mode=0o2755, gid=7),
        file("kinds/none", b"x", mode=0),
        fifo("kinds/fifo", mode=0o622),
        device("kinds/null", 1, 3, mode=0o666),
        device("kinds/big", 4095, 1_048_575, block=True),
        file("kinds/future", b"x", mtime_ns=4_102_444_800 * _S + 999_999_999),
        symlink("kinds/old-link", "x", mtime_ns=5 * _S + 5),
        file("kinds/capable", b"x", mode=0o755, xattrs={"security.capability": _CAPABILITY}),
        file("kinds/acl", b"x", mode=0o750, xattrs={"system.posix_acl_access": _ACL}),
        directory("kinds/default", xattrs={"system.posix_acl_default": _DEFAULT_ACL}),
        file("kinds/user", b"x", xattrs={"user.bin": b"\0\xff=\n", "user.empty": b""}),
        symlink("kinds/link", "x", xattrs={"user.dropped": b"1"}),
        file("kinds/trusted", b"x", xattrs={"trusted.overlay.opaque": b"y", "trusted.a": b"1"}),
        directory("kinds/opaque?", xattrs={"trusted.overlay.opaque": b"y", "user.overlay.x": b""}),
        file("kinds/unknown", b"x", xattrs={"unknown.space": b"1", "system.unknown": b"1"}),
    ]


def _links() -> list[Entry]:
    return [
        directory("links"),
        file("links/file", b"shared", xattrs={"security.capability": _CAPABILITY}),
        hard_link("links/second", "/links/file"),
        Entry(hard_link("links/third", "./links/second", uid=5, mtime_ns=7 * _S).info),
        symlink("links/symlink", "file"),
        hard_link("links/of-symlink", "links/symlink"),
        fifo("links/fifo"),
        hard_link("links/of-fifo", "links/fifo"),
        device("links/device", 1, 5),
        hard_link("links/of-device", "links/device"),
        symlink("links/here", "."),
        hard_link("links/through-a-symlink", "links/here/file"),
    ]


def _twice() -> list[Entry]:
    return [
        directory("twice"),
        file("twice/file", b"first"),
        file("twice/file", b"last", uid=3),
        directory("twice/was-directory"),
        file("twice/was-directory/leaf"),
        file("twice/was-directory", b"now a file"),
        file("twice/was-file"),
        directory("twice/was-file"),
        file("twice/was-file/leaf", b"1"),
        directory("twice/merged", mode=0o700, xattrs={"user.first": b"1"}),
        directory("twice/merged", mode=0o711, xattrs={"user.last": b"2"}),
        symlink("twice/through", "merged"),
        file("twice/through/leaf", b"1"),
    ]


def _lower() -> list[Entry]:
    """What the layers above act on."""
    return [
        directory("target"),
        file("target/kept", b"1"),
        symlink("over-link", "target"),
        file("over-file", b"1"),
        directory("plain", mode=0o750, uid=9, xattrs={"user.kept": b"1"}),
        file("plain/file", b"1"),
        directory("opaque"),
        file("opaque/old", b"1"),
        directory("opaque/old-tree"),
        file("opaque/old-tree/leaf", b"1"),
        directory("markers"),
        file("markers/was-file", b"1"),
        file("markers/gone", b"1"),
        directory("tree", mode=0o711, mtime_ns=3 * _S),
        file("tree/leaf", b"1"),
        directory("tree/replaced"),
        file("tree/replaced/leaf", b"1"),
        directory("gone"),
        file("gone/a", b"1"),
        directory("gone/b"),
        file("gone/b/c", b"1"),
    ]


def _second() -> list[Entry]:
    return [
        file("plain/new", b"parents as they were below"),
        file("over-link/new", b"beside nothing"),
        file("over-file/new", b"in what was a file"),
        directory("opaque", mode=0o700),
        file("opaque/before", b"1"),
        opaque("opaque"),
        file("opaque/after", b"1"),
        opaque("markers/under/nothing"),
        opaque("markers/was-file"),
        whiteout("markers/gone"),
        whiteout("markers/never-was"),
        file("tree/replaced", b"a file now"),
        device("gone/a", 0, 0),
        file("gone/.wh.b", b"data in a whiteout"),
    ]


def _third() -> list[Entry]:
    return [
        directory("tree/replaced", mode=0o770),
        file("tree/replaced/new", b"a directory again"),
        symlink("own", "target"),
        file("own/through", b"lands in target"),
        directory("names", mode=0o755, xattrs={"user.now": b"1"}),
        symlink("twice/was-file", "merged"),
        Entry(file("twice/merged", b"a file").info, b"a file"),
    ]


def _fourth() -> list[Entry]:
    return [
        directory("tree", mode=0o700, uid=70_000, mtime_ns=9 * _S),
        whiteout("kinds/none"),
        directory("twice", mtime_ns=9 * _S),
        directory("kinds", mode=0o1777, uid=4_294_967_294, mtime_ns=9 * _S),
        directory("gone", mtime_ns=9 * _S),
        opaque("gone"),
    ]


def _raw() -> bytes:
    """What only headers made by hand can say, and the end of the archive."""
    sparse = padded(b"2\n4096\n5\n2000000\n3\n") + b"firstend"
    sparse_records = {
        b"GNU.sparse.major": b"1",
        b"GNU.sparse.minor": b"0",
        b"GNU.sparse.name": b"raw-sparse",
        b"GNU.sparse.realsize": b"3000000",
    }
    records = {b"mtime": b"+12.5", b"uid": b"4294967295", b"LIBARCHIVE.xattr.user.x": b"eA=="}
    return b"".join(
        (
            pax({b"path": b"ignored", b"mtime": b"1"}, kind=b"g"),
            pax(records) + header(b"raw-pax"),
            member(b"L", b"raw-long\0", kind=b"L") + member(b"raw-short", b"content"),
            pax({b"uid": b"6"}) + pax({b"c": b"d"}, kind=b"g") + header(b"raw-after-global"),
            header(
                b"raw-binary", uid=b"\x80\0\0\0\x80\0\0\0", mtime=b"\x80" + bytes(7) + b"\1\0\0\0"
            ),
            header(b"raw-v7/", kind=b"\0", magic=b""),
            header(b"raw-gnu", magic=b"ustar  \0", prefix=b"00000000001\0"),
            header(b"fix", prefix=b"pre"),
            header(b"raw-blanks", mode=b"   755 ", mtime=b"7 "),
            header(b"raw-link", kind=b"1", link=b"raw-pax", size=900),
            header(b"raw-symlink", kind=b"2", link=b"x", size=900),
            pax(sparse_records) + header(b"GNUSparse/s", size=len(sparse)) + padded(sparse),
            header(b".wh..wh.aufs"),
            pax({b"uid": b"5"}),
            END,
            b"what follows the end",
        )
    )
