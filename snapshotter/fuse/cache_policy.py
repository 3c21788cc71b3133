"""What the kernel may keep of what it was told, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

SECOND_NS = 1_000_000_000
FOREVER_NS = (1 << 40) * SECOND_NS
"""More seconds than anything lives; the kernel takes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePolicy:
    """Timeouts of names, attributes and absences in nanoseconds, and what is kept over opens.

    ``keeps_data`` keeps a file's pages from one open to the next, ``keeps_listings`` those of
    directories. ``is_stateless`` is for trees that nobody can change: files and directories are
    read without being opened (OPEN and OPENDIR are answered ENOSYS once for all).
    """

    entry_ttl_ns: int
    attr_ttl_ns: int
    absence_ttl_ns: int = 0
    keeps_data: bool = False
    keeps_listings: bool = False
    is_stateless: bool = False


UNCACHED = CachePolicy(entry_ttl_ns=0, attr_ttl_ns=0)
BRIEF = CachePolicy(entry_ttl_ns=SECOND_NS, attr_ttl_ns=SECOND_NS)
"""What others may change is seen a second later."""
FOREVER = CachePolicy(
    entry_ttl_ns=FOREVER_NS,
    attr_ttl_ns=FOREVER_NS,
    absence_ttl_ns=FOREVER_NS,
    keeps_data=True,
    keeps_listings=True,
    is_stateless=True,
)
"""For an image alone."""


class KernelCache:
    """Asked at every reply how long it holds, and told of every change; by many threads.

    This one follows ``policy`` and does nothing about changes: enough where the kernel itself
    knows of them, or where timeouts are short. One that lets timeouts last overrides the methods.
    From ``changing`` to ``changed`` (which comes also when the change failed, maybe half-way), and
    on until the kernel was told, it gives what is listed there no time. ``version`` is read before
    the file system is asked and then given with the question for a time: what is older than the
    last change of it must get none either.
    """

    version = 0

    def __init__(self, policy: CachePolicy) -> None:
        self.policy = policy

    def entry_ttl_ns(self, parent: int, name: bytes, version: int) -> int:
        """How long the entry ``name`` of directory ``parent`` (a nodeid) holds."""
        return self.policy.entry_ttl_ns

    def absence_ttl_ns(self, parent: int, name: bytes, version: int) -> int:
        """How long it holds that there is no such entry."""
        return self.policy.absence_ttl_ns

    def attr_ttl_ns(self, nodeid: int, version: int) -> int:
        """How long the attributes of a node hold."""
        return self.policy.attr_ttl_ns

    def changing(self, nodeids: tuple[int, ...], names: tuple[tuple[int, bytes], ...]) -> None:
        """Attributes (and xattrs) of these nodes, and these (directory, name) pairs may change."""

    def changed(self, nodeids: tuple[int, ...], names: tuple[tuple[int, bytes], ...]) -> None:
        """What ``changing`` was told of is over; comes once for each, before the reply is made."""
