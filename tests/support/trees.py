"""Trees, layers and their comparison, for tests of anything that merges or shows an image."""

from __future__ import annotations

import stat
from typing import Any

from hypothesis import strategies as st

from snapshotter.projection.tree import EntryKind, Inode, LayerEntry, walk


def describe(root: Inode) -> dict[bytes, tuple[Any, ...]]:
    """Everything about a tree as plain values: path to attributes and group of hard links.

    A group is the first of the paths that share the inode.
    """
    first_path: dict[int, bytes] = {}
    return {
        path: (
            oct(inode.mode),
            inode.uid,
            inode.gid,
            inode.mtime_ns,
            inode.size,
            inode.rdev,
            inode.target,
            inode.content,
            tuple(sorted(inode.xattrs.items())),
            first_path.setdefault(id(inode), path),
        )
        for path, inode in walk(root)
    }


def copied(root: Inode) -> Inode:
    """A tree of new inodes, hard links shared as before."""
    made = {id(inode): _copied(inode) for _, inode in walk(root)}
    for _, inode in walk(root):
        if inode.children is not None:
            made[id(inode)].children = {n: made[id(c)] for n, c in inode.children.items()}
    return made[id(root)]


def _copied(inode: Inode) -> Inode:
    return Inode(
        inode.mode,
        uid=inode.uid,
        gid=inode.gid,
        mtime_ns=inode.mtime_ns,
        size=inode.size,
        rdev=inode.rdev,
        target=inode.target,
        content=inode.content,
        xattrs=dict(inode.xattrs),
    )


def directory(**children: Inode) -> Inode:
    """A 0755 directory with these children."""
    made = Inode(stat.S_IFDIR | 0o755)
    made.children = {name.encode(): child for name, child in children.items()}
    return made


def regular(
    size: int = 5, *, content: bytes = b"\xab" * 32, mode: int = 0o644, **more: Any
) -> Inode:
    """A regular file; its content is a name alone."""
    return Inode(stat.S_IFREG | mode, size=size, content=content if size else b"", **more)


# Strategies: few names and ids, so that entries collide -----------------------------------------

NAMES = [b"a", b"b", b"c", b"-x", b"\xff\xfe", b"d.txt"]
names = st.sampled_from(NAMES)
times_ns = st.one_of(
    st.integers(-(2**30) * 10**9, 2**33 * 10**9),
    st.sampled_from([0, -1, -(10**9), 999_999_999]),
)
ids = st.sampled_from([0, 1, 1000, 65_534, 70_000, 4_000_000_000])
permissions = st.integers(0, 0o7777)
content_ids = st.sampled_from([bytes([n]) * 32 for n in range(4)])
_values = st.binary(max_size=40)
trusted_xattrs = st.dictionaries(
    st.sampled_from([b"trusted.a", b"trusted.overlay.opaque", b"trusted.overlay.overlay.x"]),
    _values,
    max_size=2,
)
file_xattrs = st.dictionaries(
    st.sampled_from([b"user.a", b"trusted.b", b"trusted.overlay.redirect", b"user.overlay.opaque"]),
    _values,
    max_size=2,
)
targets = st.one_of(
    st.lists(st.sampled_from([b"a", b"b", b"c", b"..", b"."]), min_size=1, max_size=4).map(
        b"/".join
    ),
    st.lists(names, min_size=1, max_size=3).map(lambda parts: b"/" + b"/".join(parts)),
    st.sampled_from([b"/", b"missing/../a"]),
)


@st.composite
def attributes(draw: st.DrawFn, kind: int) -> dict[str, Any]:
    """The fields that an inode of this type can have, for Inode and LayerEntry alike."""
    made: dict[str, Any] = {
        "mode": kind | draw(permissions),
        "uid": draw(ids),
        "gid": draw(ids),
        "mtime_ns": draw(times_ns),
    }
    if kind in (stat.S_IFREG, stat.S_IFDIR):
        made["xattrs"] = draw(file_xattrs)
    else:
        made["xattrs"] = draw(trusted_xattrs)
    if kind == stat.S_IFREG:
        made["size"] = draw(st.sampled_from([0, 0, 1, 4096, 1 << 20, (1 << 20) + 1, 1 << 33]))
        made["content"] = draw(content_ids) if made["size"] else b""
    elif kind == stat.S_IFLNK:
        made["mode"] = stat.S_IFLNK | 0o777
        made["target"] = draw(targets)
    elif kind in (stat.S_IFCHR, stat.S_IFBLK):
        made["rdev"] = draw(st.sampled_from([0x103, 0x800, 0x12345, 0xFFF1_23FF]))
    return made


KINDS = [
    stat.S_IFDIR,
    stat.S_IFDIR,
    stat.S_IFREG,
    stat.S_IFLNK,
    stat.S_IFLNK,
    stat.S_IFCHR,
    stat.S_IFBLK,
    stat.S_IFIFO,
    stat.S_IFSOCK,
]


@st.composite
def trees(draw: st.DrawFn) -> Inode:
    """A tree of up to some thirty entries, hard links among them."""
    root = Inode(**draw(attributes(stat.S_IFDIR)))
    directories, files = [root], []
    for _ in range(draw(st.integers(0, 30))):
        siblings = draw(st.sampled_from(directories)).children
        assert siblings is not None
        name = draw(st.one_of(names, st.binary(min_size=1, max_size=255)))
        if name in siblings or name in (b".", b"..") or b"/" in name or b"\0" in name:
            continue
        if files and draw(st.booleans()):
            siblings[name] = draw(st.sampled_from(files))
            continue
        kind = draw(st.sampled_from(KINDS))
        siblings[name] = made = Inode(**draw(attributes(kind)))
        (directories if kind == stat.S_IFDIR else files).append(made)
    return root


@st.composite
def layer_stacks(draw: st.DrawFn) -> list[list[LayerEntry]]:
    """Up to four layers whose entries mostly fit one another, and now and then do not."""
    directories, files = [b""], [b"a"]
    return [
        [_entry(draw, directories, files) for _ in range(draw(st.integers(0, 12)))]
        for _ in range(draw(st.integers(1, 4)))
    ]


def _entry(draw: st.DrawFn, directories: list[bytes], files: list[bytes]) -> LayerEntry:
    """One entry, noted in ``directories`` or ``files`` as what later ones may refer to."""
    choice = draw(st.integers(0, 19))
    if choice == 0:
        return LayerEntry(EntryKind.NODE, b"", **draw(attributes(stat.S_IFDIR)))
    if choice in (1, 2):
        return LayerEntry(EntryKind.OPAQUE, draw(st.sampled_from(directories)))
    parent = draw(st.sampled_from(directories))
    path = (parent + b"/" if parent else b"") + draw(names)
    if choice in (3, 4):
        return LayerEntry(EntryKind.WHITEOUT, draw(st.sampled_from([*files, path])))
    if choice in (5, 6, 7):
        target = draw(st.sampled_from(files))
        files.append(path)
        header = {"mode": draw(permissions), "uid": draw(ids), "mtime_ns": draw(times_ns)}
        return LayerEntry(EntryKind.HARD_LINK, path, target=target, **header)
    kind = draw(st.sampled_from(KINDS))
    if kind in (stat.S_IFDIR, stat.S_IFLNK):
        directories.append(path)
    if kind != stat.S_IFDIR:
        files.append(path)
    return LayerEntry(EntryKind.NODE, path, **draw(attributes(kind)))
