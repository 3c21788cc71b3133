"""An image of five layers in which each layer undoes, hides or replaces parts of those below."""

import random
import struct
from pathlib import Path

import pytest

from tests.support.debian_image import LocalImage
from tests.support.images import (
    Compression,
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

MIDDLE_BYTES = 3 * (1 << 20) + 17
LARGE_BYTES = 20 * (1 << 20) + 12_345
_NET_RAW = struct.pack("<IIIII", 0x02000001, 1 << 13, 0, 0, 0)
_ACL = struct.pack(
    "<IHHIHHIHHIHHIHHI",
    2,
    *(0x01, 6, 0xFFFFFFFF),  # the owner
    *(0x02, 4, 1234),  # one named user
    *(0x04, 4, 0xFFFFFFFF),  # the group
    *(0x10, 4, 0xFFFFFFFF),  # the mask
    *(0x20, 0, 0xFFFFFFFF),  # others
)
_SECOND = 10**9


def five_layer_image(directory_path: Path) -> tuple[LocalImage, LocalImage]:
    """Writes the image below ``directory_path``; the second has the same layers all as gzip.

    umoci knows no zstd; the tars inside are the same, byte for byte.
    """
    tars = [tar_bytes(entries) for entries in (_first(), _second(), _third(), _fourth(), _fifth())]
    kinds: tuple[Compression, ...] = ("gzip", "zstd", "none", "zstd", "gzip")
    mixed = Image([Layer(tar, compression=kind) for tar, kind in zip(tars, kinds, strict=True)])
    gzipped = Image([Layer(tar) for tar in tars])
    write_layout(directory_path, {"five": mixed, "five-gzip": gzipped})
    return LocalImage(directory_path, "five"), LocalImage(directory_path, "five-gzip")


@pytest.fixture(scope="session")
def five_layers(tmp_path_factory: pytest.TempPathFactory) -> tuple[LocalImage, LocalImage]:
    """The image in its mixed compressions and all as gzip, shared by the session."""
    return five_layer_image(tmp_path_factory.mktemp("five"))


@pytest.fixture(scope="session")
def five(five_layers: tuple[LocalImage, LocalImage]) -> LocalImage:
    """The image in its mixed compressions."""
    return five_layers[0]


def noise(size: int, seed: int) -> bytes:
    """Bytes that do not compress, the same for the same seed."""
    return random.Random(seed).randbytes(size)


def _first() -> list[Entry]:
    """Everything that the later layers act on, and what none of them touches."""
    return [
        directory(".", mode=0o755, mtime_ns=1_500_000_000 * _SECOND),
        directory("keep", mode=0o1777, uid=1000, gid=50),
        file("keep/empty"),
        file("keep/small", b"small\n"),
        file("keep/exact-chunk", noise(1 << 20, 1)),
        file("keep/chunk-and-one", noise((1 << 20) + 1, 2)),
        file("keep/middle", noise(MIDDLE_BYTES, 3)),
        file("keep/large", noise(LARGE_BYTES, 4)),
        file("keep/setuid", b"#!/bin/sh\n", mode=0o4755),
        file("keep/setgid", b"#!/bin/sh\n", mode=0o2755, uid=7, gid=8),
        file("keep/unreadable", b"secret", mode=0o000),
        file("keep/big-ids", b"ids", uid=4_000_000_000, gid=3_000_000_000),
        *_odd_names(),
        *_odd_times(),
        *_links(),
        *_special(),
        *_hidden_later(),
        *_replaced_later(),
    ]


def _odd_names() -> list[Entry]:
    return [
        directory("names"),
        file("names/with space", b"1"),
        file("names/new\nline", b"2"),
        file(b"names/not-utf8-\xff\xfe", b"3"),
        file("names/" + "n" * 255, b"4"),
        file("names/.hidden", b"5"),
        file("names/back\\slash,comma:colon", b"6"),
        *(directory("/".join(["deep"] * depth)) for depth in range(1, 41)),
        file("/".join(["deep"] * 40) + "/leaf", b"leaf"),
    ]


def _odd_times() -> list[Entry]:
    return [
        directory("times", mtime_ns=1),
        file("times/epoch", b"0", mtime_ns=0),
        file("times/one-nanosecond", b"1", mtime_ns=1),
        file("times/before-1970", b"-", mtime_ns=-86_400 * _SECOND),
        file("times/after-2038", b"+", mtime_ns=4_102_444_800 * _SECOND + 999_999_999),
        symlink("times/link", "epoch", mtime_ns=12_345 * _SECOND + 6_789),
    ]


def _links() -> list[Entry]:
    return [
        directory("links"),
        file("links/a", b"one file, three names"),
        hard_link("links/b", "links/a"),
        file("links/split", b"split later"),
        hard_link("links/stays", "links/split"),
        symlink("links/absolute", "/keep/small"),
        symlink("links/relative", "../keep/small"),
        symlink("links/dangling", "nowhere/at/all"),
        symlink("links/long", "x/" * 1000 + "end"),
        hard_link("links/of-a-symlink", "links/relative"),
    ]


def _special() -> list[Entry]:
    return [
        directory("special", xattrs={"user.of": b"a directory"}),
        fifo("special/fifo", mode=0o622, uid=3),
        device("special/null", 1, 3, mode=0o666),
        device("special/disk", 259, 70_000, block=True, mode=0o660, gid=6),
        file("special/user", b"x", xattrs={"user.note": b"value\0with\xffbytes"}),
        file("special/capability", b"y", mode=0o755, xattrs={"security.capability": _NET_RAW}),
        file("special/trusted", b"z", xattrs={"trusted.mine": b"t"}),
        file("special/acl", b"acl", mode=0o640, xattrs={"system.posix_acl_access": _ACL}),
        file("special/large-value", b"v", xattrs={"user.large": noise(3000, 5)}),
    ]


def _hidden_later() -> list[Entry]:
    return [
        directory("gone"),
        file("gone/file", b"gone"),
        directory("gone/tree"),
        file("gone/tree/leaf", b"gone too"),
        directory("opaque", mode=0o711),
        file("opaque/old", b"hidden"),
        directory("opaque/old-directory"),
        file("opaque/old-directory/leaf", b"hidden"),
        file("comes-back", b"first life"),
    ]


def _replaced_later() -> list[Entry]:
    return [
        directory("was-directory"),
        file("was-directory/leaf", b"goes with it"),
        directory("was-directory-2"),
        file("was-directory-2/leaf", b"goes with it"),
        file("was-file", b"file"),
        file("was-file-2", b"file"),
        symlink("was-symlink", "keep"),
        symlink("was-symlink-2", "keep/small"),
        fifo("was-fifo"),
    ]


def _second() -> list[Entry]:
    return [
        directory("gone", mode=0o700, uid=9),
        whiteout("gone/file"),
        whiteout("gone/tree"),
        directory("opaque", mode=0o755, mtime_ns=7 * _SECOND),
        file("opaque/new", b"beside the marker, before it"),
        opaque("opaque"),
        file("opaque/newer", b"beside the marker, after it"),
        whiteout("comes-back"),
        hard_link("links/c", "links/a"),
    ]


def _third() -> list[Entry]:
    return [
        file("was-directory", b"now a file", mode=0o600),
        symlink("was-directory-2", "keep"),
        directory("was-file", mode=0o750),
        file("was-file/leaf", b"in what was a file"),
        symlink("was-file-2", "keep/small"),
        directory("was-symlink", mode=0o701),
        file("was-symlink/leaf", b"in what was a symlink"),
        file("was-symlink-2", b"now a file"),
        device("was-fifo", 1, 5, mode=0o644),
        file("comes-back", b"second life", mode=0o755),
    ]


def _fourth() -> list[Entry]:
    return [
        file("links/split", b"another file now"),
        directory("keep", mode=0o755, uid=0, gid=0, xattrs={"user.changed": b"yes"}),
        file("keep/small", b"replaced, longer than before\n", uid=5, mtime_ns=9 * _SECOND + 9),
        directory("gone/tree"),
        file("gone/tree/new", b"a new tree under an old name"),
    ]


def _fifth() -> list[Entry]:
    return [
        hard_link("links/late", "keep/large"),
        whiteout("was-file-2"),
        file("keep/added", b"added last"),
        directory(".", mode=0o755, mtime_ns=1_600_000_000 * _SECOND + 5),
    ]
