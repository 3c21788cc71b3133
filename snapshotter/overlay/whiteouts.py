"""How overlayfs writes into an upper what a layer cannot hold otherwise. Pure: no I/O.

A whiteout is a character device 0/0; in a lower it may be an empty file with a mark, which whoever
makes images may leave where devices cannot be. Everything else is extended attributes below a
prefix, which is ``trusted.overlay.`` for a mount of root's and ``user.overlay.`` otherwise (mount
option ``userxattr``). A file's own attribute of that name space is kept below ``<prefix>overlay.``.
Source: Documentation/filesystems/overlayfs.rst of the kernel.
"""

from __future__ import annotations

import stat

import msgspec

from snapshotter.vfs import TYPE_MASK

WHITEOUT_MODE = stat.S_IFCHR
"""Type and permissions of a whiteout; its device number is 0."""

YES = b"y"
"""The value of the opaque mark."""

WITH_WHITEOUTS = b"x"
"""The opaque mark of a directory that hides nothing, but has empty files as whiteouts in it."""


def is_whiteout(mode: int, rdev: int) -> bool:
    """Whether attributes are those of a whiteout."""
    return rdev == 0 and mode & TYPE_MASK == stat.S_IFCHR


class OverlayXattrs(msgspec.Struct, frozen=True):
    """The names of the marks below one prefix, and how a file's own names avoid them."""

    prefix: bytes

    @property
    def opaque(self) -> bytes:
        """A directory that hides those of the layers below: ``y``."""
        return self.prefix + b"opaque"

    @property
    def redirect(self) -> bytes:
        """Where the layers below have this directory: a name, or an absolute path."""
        return self.prefix + b"redirect"

    @property
    def metacopy(self) -> bytes:
        """A file whose content is in a layer below."""
        return self.prefix + b"metacopy"

    @property
    def whiteout(self) -> bytes:
        """An empty file of a lower that is a whiteout."""
        return self.prefix + b"whiteout"

    @property
    def alias(self) -> bytes:
        """Ours: which lower inode with several names this file is, see ``aliases``."""
        return self.prefix + b"lazy.alias"

    @property
    def _escaped(self) -> bytes:
        return self.prefix + b"overlay."

    def stored(self, name: bytes) -> bytes:
        """The name under which a file's own attribute ``name`` is kept."""
        if name.startswith(self.prefix):
            return self._escaped + name[len(self.prefix) :]
        return name

    def shown(self, stored: bytes) -> bytes | None:
        """The file's own name of a stored attribute; None for a mark, which nobody sees."""
        if not stored.startswith(self.prefix):
            return stored
        if stored.startswith(self._escaped):
            return self.prefix + stored[len(self._escaped) :]
        return None


TRUSTED = OverlayXattrs(b"trusted.overlay.")
USER = OverlayXattrs(b"user.overlay.")
