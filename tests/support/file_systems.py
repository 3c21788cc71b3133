"""One small tree, on disk and as every kind of file system that can show it."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from snapshotter.fuse.cache_policy import BRIEF, KernelCache
from snapshotter.fuse.file_system_server import FileSystemServer
from snapshotter.fuse.server import Server
from snapshotter.names import ContentName
from snapshotter.overlay.directory_lower import DirectoryLower
from snapshotter.overlay.merged import Merged
from snapshotter.overlay.metadata_cache import MetadataCache
from snapshotter.overlay.upper import Upper
from snapshotter.projection.image_lower import ImageLower, ObjectDirectory
from snapshotter.projection.image_reader import ImageReader
from snapshotter.projection.image_writer import write_image
from snapshotter.projection.tree import Inode
from snapshotter.vfs import Lower
from tests.support.fuse_client import Ask, FuseClient
from tests.support.overlay_trees import fill
from tests.support.virtiofs_guest import guest_asks

READABLE = ["image", "directory", "immutable directory", "image alone merged", "two lowers"]
READABLE += ["served image", "guest's image"]
WRITABLE = ["upper on an image", "upper on a directory", "upper on a mutable directory"]
WRITABLE += ["served upper on an image", "guest's upper on an image"]
_SERVED, _GUEST = "served", "guest's"
"""First word of a kind: through requests and replies of a FUSE server, and by virtqueues."""


def make_sample(root: Path) -> None:
    """Some of everything, without hard links."""
    root.mkdir()
    files: dict[str, bytes | None] = {"dir": None, "dir/sub": None, "dir/sub/deep": b"deep"}
    files |= {"empty": b"", "file": b"0123456789", "large": bytes(range(256)) * 5000}
    files |= {f"many/{number:03}": b"" for number in range(300)}
    fill(root, files)
    os.symlink("dir/sub", root / "link")
    os.mkfifo(root / "fifo", 0o640)
    os.mknod(root / "device", stat.S_IFBLK | 0o600, os.makedev(7, 300))
    for path in (root / "link", root / "fifo", root / "device", root):
        os.utime(path, ns=(10**18, 10**18), follow_symlinks=False)


def tree_of(root: Path, objects: Path) -> Inode:
    """The tree below ``root`` as a metadata image has it, its content put into ``objects``."""
    seen: dict[int, Inode] = {}

    def visit(path: Path) -> Inode:
        status = path.lstat()
        known = seen.get(status.st_ino)
        if known is not None:
            return known
        made = Inode(
            status.st_mode,
            uid=status.st_uid,
            gid=status.st_gid,
            mtime_ns=status.st_mtime_ns,
            rdev=status.st_rdev,
            size=status.st_size if stat.S_ISREG(status.st_mode) else 0,
            target=os.fsencode(os.readlink(path)) if path.is_symlink() else b"",
            xattrs={
                os.fsencode(name): os.getxattr(path, name, follow_symlinks=False)
                for name in os.listxattr(path, follow_symlinks=False)
            },
        )
        seen[status.st_ino] = made
        if made.size:
            made.content = _put_object(path.read_bytes(), objects)
        if made.children is not None:
            made.children = {os.fsencode(p.name): visit(p) for p in path.iterdir()}
        return made

    return visit(root)


def _put_object(content: bytes, objects: Path) -> bytes:
    content_id = hashlib.sha256(content).digest()  # what an id is of does not matter here
    path = objects / ContentName(content_id, len(content)).path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return content_id


def image_lower(root: Path, objects: Path) -> ImageLower:
    objects.mkdir(exist_ok=True)
    image = ImageReader(bytes(write_image(tree_of(root, objects))))
    return ImageLower(image, ObjectDirectory(objects))


@contextmanager
def file_system(kind: str, sample: Path, base: Path) -> Iterator[Any]:
    """A file system of this kind that shows the tree in ``sample``."""
    how, _, seen = kind.partition(" ")
    connect = {_SERVED: directly, _GUEST: guest_asks}.get(how)
    if connect is None:
        with _plain_file_system(kind, sample, base) as made:
            yield made
        return
    with (
        _plain_file_system(seen, sample, base) as made,
        served(made, seen in WRITABLE, connect) as client,
    ):
        yield client


@contextmanager
def directly(server: Server) -> Iterator[Ask]:
    """Calls the server."""

    def ask(request: bytes) -> bytes | None:
        reply = server.handle(memoryview(request))
        return None if reply is None else b"".join(reply)

    yield ask


@contextmanager
def served(
    fs: Any,
    writable: bool,
    connect: Callable[[Server], AbstractContextManager[Ask]] = directly,
) -> Iterator[FuseClient]:
    """``fs`` through a FUSE server. At the end nothing may be open and nothing have gone wrong."""
    faults: list[Exception] = []
    server = FileSystemServer(
        fs,
        KernelCache(BRIEF),
        writable=writable,
        report_fault=lambda error, _header: faults.append(error),
    )

    with connect(server) as ask:
        yield FuseClient(ask)
    assert faults == []
    assert (len(server.connection.files), len(server.connection.directories)) == (0, 0)


@contextmanager
def _plain_file_system(kind: str, sample: Path, base: Path) -> Iterator[Any]:
    directory = DirectoryLower(sample)
    immutable = DirectoryLower(sample, immutable=True, cache=MetadataCache(), layer=1)
    image = image_lower(sample, base / "objects")
    empty = base / "empty"
    empty.mkdir()
    lowers: dict[str, list[Lower[Any]]] = {
        "image alone merged": [image],
        "two lowers": [image, directory],
        "upper on an image": [image],
        "upper on a directory": [immutable],
        "upper on a mutable directory": [directory],
    }
    upper = None
    if kind in WRITABLE:
        (base / "upper").mkdir()
        (base / "work").mkdir()
        status = sample.stat()
        os.utime(base / "upper", ns=(status.st_atime_ns, status.st_mtime_ns))
        os.chmod(base / "upper", stat.S_IMODE(status.st_mode))
        upper = Upper(base / "upper", base / "work")
    plain = {"image": image, "directory": directory, "immutable directory": immutable}
    try:
        yield plain[kind] if kind in plain else Merged(lowers[kind], upper)
    finally:
        if upper is not None:
            upper.close()
        directory.close()
        immutable.close()
