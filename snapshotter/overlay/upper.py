"""The upper: a directory that holds what was written, and a work directory to prepare it in.

Everything is made complete in ``work`` and then put in place by one rename, so that a crash leaves
either what was or what is to be; leftovers in ``work`` are removed at the next start. Both
directories must be ours alone: they are locked (flock) as long as this object lives.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import stat
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from snapshotter.errors import BusyError, InvalidInputError
from snapshotter.overlay import acls, syscalls
from snapshotter.overlay.metacopies import ContentBelow
from snapshotter.overlay.node import Node
from snapshotter.overlay.whiteouts import TRUSTED, WHITEOUT_MODE, YES, OverlayXattrs
from snapshotter.vfs import NO_MARKS, Marks

ALIASES = "aliases"
"""Directory beside the work directory proper: one more name of each file with aliases."""

_WORK = "work"
_INCOMPATIBLE = "incompat"
"""In the work directory: features of the last mount that others must know of, each a directory."""
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_CACHED_DIRECTORIES = 128
"""Descriptors that stay open, the most recently used."""
_NO_MARK = frozenset((errno.ENODATA, errno.EOPNOTSUPP))


class Place(NamedTuple):
    """Where system calls find a file: a name in an open directory, or a held descriptor's path."""

    directory: int | None
    name: bytes

    @property
    def is_held(self) -> bool:
        """Whether ``name`` is a link of /proc, to be followed, to the file itself."""
        return self.directory is None

    @property
    def path(self) -> bytes:
        """For system calls that take no directory descriptor."""
        if self.directory is None:
            return self.name
        return b"/proc/self/fd/%d/%s" % (self.directory, self.name)


class Upper:
    """The directories ``upper`` and ``work``, which are on one file system.

    Opening it raises InvalidInputError if they are not, or if the last mount was volatile, and
    BusyError if somebody else uses one of them. ``volatile`` never syncs, and leaves a mark that
    says so in the work directory, which stays until somebody removes it. Everything else raises
    OSError, and is called under the lock of the tree.
    """

    def __init__(
        self,
        upper: str | os.PathLike[str],
        work: str | os.PathLike[str],
        *,
        xattrs: OverlayXattrs = TRUSTED,
        volatile: bool = False,
    ) -> None:
        self.xattrs = xattrs
        self.is_volatile = volatile
        self._numbers = itertools.count()
        self._directories: OrderedDict[Node, int] = OrderedDict()
        self._whiteout: bytes | None = None
        self._text_prefix = os.fsdecode(xattrs.prefix)
        with contextlib.ExitStack() as opened:
            self.root = _open_exclusively(upper, opened)
            base = _open_exclusively(work, opened)
            if os.fstat(self.root).st_dev != os.fstat(base).st_dev:
                raise InvalidInputError(f"upper {upper} and work {work}: not on one file system")
            self.work = _open_inside(base, _WORK, opened)
            self.alias_directory = _open_inside(base, ALIASES, opened)
            self.aliases = set(os.listdir(os.fsencode(f"/proc/self/fd/{self.alias_directory}")))
            self._expect_complete(work)
            self._closing = opened.pop_all()
        for leftover in self._scan_work():
            self.discard(leftover)
        if volatile:
            self._note_volatile()

    def _expect_complete(self, work: str | os.PathLike[str]) -> None:
        """Refuses what an earlier mount left that did not sync, or had a feature unknown here."""
        try:
            features = os.listdir(f"/proc/self/fd/{self.work}/{_INCOMPATIBLE}")
        except FileNotFoundError:
            return
        for feature in features:
            path = os.path.join(os.fspath(work), _WORK, _INCOMPATIBLE, feature)
            raise InvalidInputError(
                f"work {os.fspath(work)} was last used with the feature {feature!r}, so the upper "
                f"may lack what was never synced; remove {path} to use it as it is"
            )

    def _note_volatile(self) -> None:
        """As the kernel does: a later mount must not take the upper for complete."""
        path = f"/proc/self/fd/{self.work}/{_INCOMPATIBLE}/volatile"
        os.makedirs(path, mode=0o700)
        os.close(os.open(f"{path}/dirty", os.O_CREAT | os.O_WRONLY, 0o600))

    def sync(self, descriptor: int, *, data_only: bool = False) -> None:
        """fsync(2), or nothing in a volatile upper."""
        if not self.is_volatile:
            (os.fdatasync if data_only else os.fsync)(descriptor)

    def close(self) -> None:
        """Lets go of the directories; files that are open stay usable."""
        if self._whiteout is not None:
            self.discard(Place(self.work, self._whiteout))
            self._whiteout = None
        for descriptor in self._directories.values():
            os.close(descriptor)
        self._directories.clear()
        self._closing.close()

    # Finding ------------------------------------------------------------------------------------

    def directory(self, node: Node) -> int:
        """A descriptor of the directory ``node``, good until the call after the next."""
        while len(self._directories) > _CACHED_DIRECTORIES:
            os.close(self._directories.popitem(last=False)[1])
        known = self._directories.get(node)
        if known is not None:
            self._directories.move_to_end(node)
            return known
        below = []
        descriptor: int | None = None
        while descriptor is None:
            if not node.names:
                descriptor = self._detached(node)
                break
            below.append(node)
            node = node.names[0][0]
            descriptor = self._directories.get(node)
        for child in reversed(below):
            descriptor = os.open(child.names[0][1], _OPEN_DIRECTORY, dir_fd=descriptor)
            self._directories[child] = descriptor
        return descriptor

    def _detached(self, node: Node) -> int:
        """The root, or a directory that was removed and is held."""
        return self.root if node.held is None else node.held

    def place(self, node: Node) -> Place:
        """Where the file ``node`` is."""
        if node.names:
            parent, name = node.names[0]
            return Place(self.directory(parent), name)
        if node.held is None:
            return Place(self.root, b".")
        return Place(None, b"/proc/self/fd/%d" % node.held)

    def stat(self, node: Node) -> os.stat_result:
        """The attributes of ``node``."""
        if node.held is not None:
            return os.fstat(node.held)
        place = self.place(node)
        return os.stat(place.name, dir_fd=place.directory, follow_symlinks=place.is_held)

    def find(self, parent: Node, name: bytes) -> os.stat_result | None:
        """What is at ``name``, be it a whiteout; None for nothing."""
        try:
            return os.stat(name, dir_fd=self.directory(parent), follow_symlinks=False)
        except FileNotFoundError:
            return None

    @contextmanager
    def scan(self, node: Node) -> Iterator[Iterator[os.DirEntry[str]]]:
        """The names that are physically in a directory, whiteouts among them."""
        descriptor = os.open(b".", _OPEN_DIRECTORY, dir_fd=self.directory(node))
        try:
            with os.scandir(descriptor) as entries:
                yield entries
        finally:
            os.close(descriptor)

    def hold(self, node: Node) -> int:
        """Keeps ``node`` within reach, whatever happens to its names; returns a descriptor."""
        if node.held is None:
            place = self.place(node)
            node.hold(os.open(place.name, os.O_PATH | os.O_NOFOLLOW, dir_fd=place.directory))
        assert node.held is not None
        return node.held

    def open(self, node: Node, flags: int) -> int:
        """Opens a regular file; ContentBelow, with nothing changed, for a metacopy."""
        if node.has_content:
            return self._open_file(node, flags)
        opened = self._open_file(node, flags & ~os.O_TRUNC)
        if self.mark(opened, self.xattrs.metacopy) is not None:
            os.close(opened)
            raise ContentBelow(self.place(node).name, self.redirect(node))
        node.has_content = True
        if flags & os.O_TRUNC:
            os.ftruncate(opened, 0)
        return opened

    def open_metacopy(self, node: Node) -> int:
        """Opens a metacopy, to give it its content."""
        return self._open_file(node, os.O_WRONLY)

    def _open_file(self, node: Node, flags: int) -> int:
        place = self.place(node)
        follow = 0 if place.is_held else os.O_NOFOLLOW
        return os.open(place.name, flags | follow, dir_fd=place.directory)

    # Marks --------------------------------------------------------------------------------------

    def mark(self, place: Place | int, name: bytes) -> bytes | None:
        """The value of a mark, by place or open descriptor; None if it is not there."""
        try:
            if isinstance(place, int):
                return os.getxattr(place, name)
            return os.getxattr(place.path, name, follow_symlinks=place.is_held)
        except OSError as error:
            if error.errno in _NO_MARK:
                return None
            raise

    def directory_marks(self, place: Place) -> Marks:
        """The marks of a directory. Most have none, and one call says so."""
        if not any(
            name.startswith(self._text_prefix)
            for name in os.listxattr(place.path, follow_symlinks=place.is_held)
        ):
            return NO_MARKS
        redirect = self.mark(place, self.xattrs.redirect) or b""
        return Marks(self.mark(place, self.xattrs.opaque) == YES, redirect)

    def redirect(self, node: Node) -> bytes:
        """Where the lowers have a file's content; b"" for the same place."""
        return self.mark(self.place(node), self.xattrs.redirect) or b""

    def is_metacopy(self, node: Node) -> bool:
        """Whether the content of a regular file is in a lower."""
        if not node.has_content:
            mark = self.mark(self.place(node), self.xattrs.metacopy)
            node.has_content = mark is None
        return not node.has_content

    def set_mark(self, place: Place, name: bytes, value: bytes) -> None:
        """Sets a mark."""
        os.setxattr(place.path, name, value, follow_symlinks=place.is_held)

    def make_opaque(self, place: Place) -> None:
        """Lets a directory hide those of the lowers."""
        self.set_mark(place, self.xattrs.opaque, YES)

    # Making -------------------------------------------------------------------------------------

    def temporary(self) -> Place:
        """A name in the work directory that is free."""
        return Place(self.work, b"#%x" % next(self._numbers))

    def put(self, made: Place, parent: Node, name: bytes, flags: int = 0) -> None:
        """Renames what was made to its place. Over a whiteout go files, not directories."""
        assert made.directory is not None
        syscalls.rename(made.directory, made.name, self.directory(parent), name, flags)

    def put_over_whiteout(self, made: Place, parent: Node, name: bytes) -> None:
        """Puts a directory where there is a whiteout."""
        self.put(made, parent, name, syscalls.RENAME_EXCHANGE)
        os.unlink(made.name, dir_fd=made.directory)

    def whiteout(self, directory: int, name: bytes) -> None:
        """Makes a whiteout at a free name: one more link to the last one, as the kernel does."""
        if self._whiteout is not None:
            try:
                os.link(self._whiteout, name, src_dir_fd=self.work, dst_dir_fd=directory)
            except OSError as error:
                if error.errno != errno.EMLINK:
                    raise
            else:
                return
            self.discard(Place(self.work, self._whiteout))
        made = self.temporary()
        os.mknod(made.name, WHITEOUT_MODE, 0, dir_fd=made.directory)
        self._whiteout = made.name
        os.link(made.name, name, src_dir_fd=self.work, dst_dir_fd=directory)

    def new_whiteout(self) -> Place:
        """A whiteout, ready to be put in place."""
        made = self.temporary()
        self.whiteout(self.work, made.name)
        return made

    def discard(self, made: Place) -> None:
        """Removes something from the work directory with all that is in it."""
        try:
            os.unlink(made.name, dir_fd=made.directory)
        except FileNotFoundError:
            return
        except (IsADirectoryError, PermissionError):
            _remove_tree(self.work, made.name)

    def clear(self, node: Node) -> None:
        """Makes a directory that shows nothing physically empty: whiteouts go."""
        with self.scan(node) as entries:
            if next(entries, None) is None:
                return
        place = self.place(node)
        status = self.stat(node)
        made = self.temporary()
        os.mkdir(made.name, 0o700, dir_fd=made.directory)
        self.make_opaque(made)
        os.chown(made.name, status.st_uid, status.st_gid, dir_fd=made.directory)
        os.chmod(made.name, stat.S_IMODE(status.st_mode), dir_fd=made.directory)
        assert place.directory is not None
        self.forget_directory(node)
        syscalls.rename(self.work, made.name, place.directory, place.name, syscalls.RENAME_EXCHANGE)
        self.discard(made)

    def hold_directory(self, node: Node) -> None:
        """``hold`` for a directory that is to be removed."""
        descriptor = self._directories.pop(node, None)
        if descriptor is None:
            self.hold(node)
        else:
            node.hold(descriptor)

    def forget_directory(self, node: Node) -> None:
        """Closes what may be open of a directory whose place another is to take."""
        descriptor = self._directories.pop(node, None)
        if descriptor is not None:
            os.close(descriptor)

    def _scan_work(self) -> list[Place]:
        names = os.listdir(os.fsencode(f"/proc/self/fd/{self.work}"))
        return [Place(self.work, name) for name in names]


def _open_exclusively(path: str | os.PathLike[str], opened: contextlib.ExitStack) -> int:
    descriptor = os.open(path, _OPEN_DIRECTORY)
    opened.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BusyError(f"{path} is the upper or work directory of another mount") from error
    return descriptor


def _open_inside(directory: int, name: str, opened: contextlib.ExitStack) -> int:
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=directory)
    descriptor = os.open(name, _OPEN_DIRECTORY, dir_fd=directory)
    opened.callback(os.close, descriptor)
    with contextlib.suppress(OSError):  # none, or none possible: new files are to inherit nothing
        os.removexattr(descriptor, acls.DEFAULT)
    return descriptor


def _remove_tree(directory: int, name: bytes) -> None:
    """Removes a directory and what is in it, however deep that goes."""
    opened = [os.open(name, _OPEN_DIRECTORY, dir_fd=directory)]
    names = [name]
    while opened:
        below = _remove_files(opened[-1])
        if below is not None:
            opened.append(os.open(below, _OPEN_DIRECTORY, dir_fd=opened[-1]))
            names.append(below)
            continue
        os.close(opened.pop())
        os.rmdir(names.pop(), dir_fd=opened[-1] if opened else directory)


def _remove_files(directory: int) -> bytes | None:
    """Unlinks all but directories; the name of one of these, if there is one."""
    below = None
    for name in os.listdir(b"/proc/self/fd/%d" % directory):
        if stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
            below = name
        else:
            os.unlink(name, dir_fd=directory)
    return below
