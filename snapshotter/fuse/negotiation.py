"""INIT: what a server and its kernel agree on. No I/O."""

from __future__ import annotations

import errno
from dataclasses import dataclass

from snapshotter.fuse import wire
from snapshotter.fuse.replies import InitReply
from snapshotter.fuse.wire import Init, InitFlag

MAX_READ_BYTES = 1 << 20
"""A READ asks for one chunk at most."""

_PAGE_SIZE = 4096

_BOTH = (
    InitFlag.ASYNC_READ
    | InitFlag.BIG_WRITES
    | InitFlag.PARALLEL_DIROPS  # else lookups in one directory wait for one another
    | InitFlag.DO_READDIRPLUS
    | InitFlag.READDIRPLUS_AUTO
    | InitFlag.MAX_PAGES
    | InitFlag.INIT_EXT
)

READ_ONLY = (
    _BOTH
    | InitFlag.NO_OPEN_SUPPORT
    | InitFlag.NO_OPENDIR_SUPPORT
    | InitFlag.CACHE_SYMLINKS
    | InitFlag.EXPLICIT_INVAL_DATA  # content never changes: only we could drop pages
)
"""Features of a tree that nobody changes."""

WRITABLE = (
    _BOTH
    | InitFlag.ATOMIC_O_TRUNC  # an open that truncates copies nothing up
    | InitFlag.ASYNC_DIO
    | InitFlag.DONT_MASK  # a default ACL counts before the umask
    | InitFlag.POSIX_ACL
    | InitFlag.AUTO_INVAL_DATA
    | InitFlag.HANDLE_KILLPRIV_V2  # else each write asks for security.capability first
    | InitFlag.SETXATTR_EXT
)
"""Features of a tree that is written to, through this mount or beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a server offers. ``max_stack_depth`` other than 0 allows passthrough."""

    features: InitFlag
    max_write: int = MAX_READ_BYTES
    max_pages: int = MAX_READ_BYTES // _PAGE_SIZE
    max_background: int = 128
    max_stack_depth: int = 0


def settle(offer: Init, terms: Terms) -> InitReply:
    """The answer to INIT; OSError (EPROTO) if the kernel's protocol is too old."""
    if offer.major != wire.MAJOR or offer.minor < wire.MIN_MINOR:
        raise OSError(
            errno.EPROTO,
            f"FUSE INIT: the kernel speaks {offer.major}.{offer.minor}; 7.{wire.MIN_MINOR} "
            "(Linux 5.4) or newer is needed",
        )
    flags = offer.flags & terms.features
    return InitReply(
        minor=min(offer.minor, wire.MAX_MINOR),
        max_readahead=offer.max_readahead,
        flags=flags,
        max_background=terms.max_background,
        congestion_threshold=terms.max_background * 3 // 4,
        max_write=terms.max_write,
        max_pages=terms.max_pages,
        max_stack_depth=terms.max_stack_depth if flags & InitFlag.PASSTHROUGH else 0,
    )
