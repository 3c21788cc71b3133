"""Which nodeid the kernel knows which node of a file system by, and how often it was told.

The kernel counts every entry that it is answered (LOOKUP, READDIRPLUS and what makes files) and
gives the counts back by FORGET. Nodeids are never used again, so their generation is always 0.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterable
from typing import Generic, TypeVar

from snapshotter.fuse.wire import ROOT_NODEID

N = TypeVar("N")


class Inodes(Generic[N]):
    """The nodes that the kernel knows, from any thread. They are held until it forgets them.

    ``limit`` bounds how many; more are refused with ENFILE.
    """

    def __init__(self, root: N, *, limit: int | None = None) -> None:
        self._root = root
        self._limit = limit
        self._lock = threading.Lock()
        self._next = ROOT_NODEID + 1
        self.clear()

    def __len__(self) -> int:
        return len(self._nodes)

    def clear(self) -> None:
        """Forgets all nodes, as the kernel has when it begins or ends a connection."""
        self._nodes: dict[int, N] = {ROOT_NODEID: self._root}
        self._nodeids: dict[N, int] = {self._root: ROOT_NODEID}
        self._lookups: dict[int, int] = {}

    def node(self, nodeid: int) -> N:
        """The node behind ``nodeid``; ESTALE if the kernel does not know it from here."""
        try:
            return self._nodes[nodeid]
        except KeyError:
            raise OSError(errno.ESTALE, f"nodeid {nodeid} is not known") from None

    def nodeid(self, node: N) -> int | None:
        """What the kernel knows ``node`` by, if it does."""
        return self._nodeids.get(node)

    def look_up(self, node: N) -> int:
        """The nodeid of a node that the kernel is about to be told of; counts that."""
        with self._lock:
            nodeid = self._nodeids.get(node)
            if nodeid is None:
                nodeid = self._add(node)
            elif nodeid != ROOT_NODEID:
                self._lookups[nodeid] += 1
            return nodeid

    def forget(self, forgets: Iterable[tuple[int, int]]) -> None:
        """Takes pairs of nodeid and lookups back. What was not given is not taken."""
        gone = []  # what a node holds is let go of without the lock
        with self._lock:
            for nodeid, lookups in forgets:
                left = self._lookups.get(nodeid, 0) - lookups
                if left > 0:
                    self._lookups[nodeid] = left
                elif nodeid in self._lookups:
                    del self._lookups[nodeid]
                    node = self._nodes.pop(nodeid)
                    del self._nodeids[node]
                    gone.append(node)

    def _add(self, node: N) -> int:
        if self._limit is not None and len(self._nodes) >= self._limit:
            raise OSError(errno.ENFILE, "the kernel knows too many nodes")
        nodeid = self._next
        self._next += 1
        self._nodes[nodeid] = node
        self._nodeids[node] = nodeid
        self._lookups[nodeid] = 1
        return nodeid
