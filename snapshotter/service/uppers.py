"""Uppers: the directories that hold what a view's users wrote, and what may be mounted on them.

A directory holds ``upper/``, ``work/`` and ``upper.json``. Files in an upper may be metacopies
(owner and mode here, content in the metadata image), so an upper belongs to one metadata image:
over another it would show other content under the old name, silently. ``upper.json`` names it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

import msgspec

from snapshotter.decoding import DECODE_ERRORS
from snapshotter.errors import CorruptError, InvalidInputError
from snapshotter.kernel_view import syscalls

_RECORD = "upper.json"
_PRIVATE_XATTRS = "trusted.overlay."


class UpperRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What an upper belongs to: the metadata image (``sha256:…``) and, for people, the image."""

    metadata_image: str
    image: str


@dataclass(frozen=True, slots=True)
class Upper:
    """The two directories that overlayfs takes, and the one that holds them."""

    directory: Path

    @property
    def upper(self) -> Path:
        """overlayfs's upperdir."""
        return self.directory / "upper"

    @property
    def work(self) -> Path:
        """overlayfs's workdir."""
        return self.directory / "work"

    @property
    def volatile_mark(self) -> Path:
        """Made by overlayfs for a volatile mount, and in the way of every later mount."""
        return self.work / "work" / "incompat" / "volatile"


def prepare(directory: Path, record: UpperRecord, image_root: str) -> Upper:
    """The upper in ``directory``, made new (with the attributes of the image's root) or used again.

    Raises InvalidInputError, before anything is changed, for one of another metadata image, one
    that is no upper of ours, and one whose last, volatile use did not end cleanly.
    """
    if not directory.is_absolute():
        raise InvalidInputError(f"upper {directory}: an absolute path is needed")
    upper = Upper(directory)
    known = _load(directory)
    if known is None:
        _check_is_free(directory)
        _save(directory, record)
    elif known.metadata_image != record.metadata_image:
        raise InvalidInputError(
            f"upper {directory} was made over {known.image} ({known.metadata_image}); over "
            f"{record.image} ({record.metadata_image}) its files could show wrong content: mount "
            "the image it was made over, or give another directory"
        )
    elif upper.volatile_mark.exists():
        raise InvalidInputError(
            f"upper {directory}: its last use was volatile and did not end cleanly, so files may "
            f"be torn: give another directory, or remove {upper.volatile_mark} to use it anyway"
        )
    if not upper.upper.exists():
        _make(upper, image_root)
    return upper


def end_volatile(upper: Upper) -> None:
    """After a clean unmount of a volatile view: makes the upper durable, then usable again."""
    descriptor = os.open(upper.directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        syscalls.syncfs(descriptor)
    finally:
        os.close(descriptor)
    try:
        shutil.rmtree(upper.volatile_mark)
    except FileNotFoundError:
        pass


def is_in_use(upper: Upper) -> bool:
    """Whether some overlay, in whatever mount namespace, stands on the upper.

    A fuse view holds a lock on it. As to overlayfs, the kernel knows: with an index it refuses an
    upper that is in use, and looks at that first. For private and volatile uppers only: the try
    leaves marks in one that is free and not volatile.
    """
    if not upper.upper.is_dir():
        return False
    if _is_locked(upper.upper):
        return True
    lower = upper.directory / ".lower"
    lower.mkdir(exist_ok=True)
    options: list[tuple[str, str | None]] = [
        ("lowerdir", str(lower)),
        ("upperdir", str(upper.upper)),
        ("workdir", str(upper.work)),
        ("index", "on"),
        ("volatile", None),
    ]
    try:
        os.close(syscalls.make_mount("overlay", options))
    except OSError as error:
        return error.errno == errno.EBUSY
    finally:
        lower.rmdir()
    return False


def _is_locked(directory: Path) -> bool:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _load(directory: Path) -> UpperRecord | None:
    path = directory / _RECORD
    try:
        return msgspec.json.decode(path.read_bytes(), type=UpperRecord)
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        raise InvalidInputError(f"upper {directory}: not a directory") from error
    except DECODE_ERRORS as error:
        raise CorruptError(f"{path}: {error}; the upper's image is not known any more") from error


def _check_is_free(directory: Path) -> None:
    if directory.exists() and any(path != _unfinished(directory) for path in directory.iterdir()):
        raise InvalidInputError(
            f"upper {directory}: not empty, and without the {_RECORD} of an upper; "
            "give an empty or a new directory"
        )


def _save(directory: Path, record: UpperRecord) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = _unfinished(directory)
    temporary.write_bytes(msgspec.json.encode(record))
    temporary.replace(directory / _RECORD)


def _unfinished(directory: Path) -> Path:
    """What a daemon that was killed may have left of the record, in a directory that was free."""
    return directory / f".{_RECORD}.new"


def _make(upper: Upper, image_root: str) -> None:
    """``upper/`` appears last, complete: a crash before leaves nothing in the way."""
    upper.work.mkdir(exist_ok=True)
    unfinished = upper.directory / ".upper.new"
    unfinished.mkdir(exist_ok=True)
    copy_attributes(image_root, unfinished)
    unfinished.rename(upper.upper)


def copy_attributes(source: str, target: Path) -> None:
    """Makes an upper's root look like the image's, since overlayfs shows it as the view's."""
    for name in os.listxattr(source):
        if not name.startswith(_PRIVATE_XATTRS):
            os.setxattr(target, name, os.getxattr(source, name))
    status = os.stat(source)
    os.chown(target, status.st_uid, status.st_gid)
    target.chmod(stat.S_IMODE(status.st_mode))
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


def remove(directory: Path) -> None:
    """Removes a private upper with all it holds; what is gone already is no error."""
    shutil.rmtree(directory, ignore_errors=True)
