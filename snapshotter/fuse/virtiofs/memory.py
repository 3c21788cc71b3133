"""A guest's memory, as a vhost-user front end lends it: regions of shared files, mapped here.

Descriptors of virtqueues name *guest* addresses, the front end names the rings themselves by its
own *user* addresses; both are looked up here and nothing outside the table of regions is ever
given out. Views keep their mapping alive, so memory that was replaced while a request still uses
it goes away with the last view of it.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
from collections.abc import Sequence
from typing import NamedTuple

from snapshotter.errors import InvalidInputError

MAX_REGIONS = 8
"""As many as a front end may send without having negotiated more (VHOST_MEMORY_BASELINE_NREGIONS
of the vhost-user protocol)."""

_ADDRESS_SPACE = 1 << 64
_MAX_REGION_BYTES = 1 << 46
"""64 TiB, more than any guest has: what is larger is a mistake, and must not overflow mmap."""


class RegionLayout(NamedTuple):
    """Where a region lies for the guest, for the front end and in its file; all in bytes."""

    guest_address: int
    size: int
    user_address: int
    file_offset: int


class Region:
    """One mapped region; ``guest_end`` is the first guest address behind it."""

    __slots__ = ("file_offset", "guest_address", "guest_end", "size", "user_address", "view")

    def __init__(self, layout: RegionLayout, descriptor: int) -> None:
        """Maps the region from ``descriptor``, which stays the caller's.

        Raises InvalidInputError for a layout that wraps around, exceeds its file, or whose file
        could be cut short under the mapping: touching what was cut would kill this process.
        """
        guest_address, size, user_address, file_offset = layout
        if (
            not 0 < size <= _MAX_REGION_BYTES
            or file_offset > _MAX_REGION_BYTES
            or guest_address + size > _ADDRESS_SPACE
            or user_address + size > _ADDRESS_SPACE
        ):
            raise InvalidInputError(f"memory region {layout} is not possible")
        _check_seals(descriptor)
        try:
            mapping = mmap.mmap(descriptor, file_offset + size, mmap.MAP_SHARED)
        except (ValueError, OSError) as error:
            raise InvalidInputError(f"memory region {layout} cannot be mapped: {error}") from error
        self.guest_address = guest_address
        self.guest_end = guest_address + size
        self.user_address = user_address
        self.file_offset = file_offset
        self.size = size
        self.view = memoryview(mapping)[file_offset : file_offset + size]


def _check_seals(descriptor: int) -> None:
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if not seals & fcntl.F_SEAL_SHRINK:
        raise InvalidInputError(
            "guest memory is in a file that may shrink; give the VM memory that cannot "
            "(QEMU: -object memory-backend-memfd,share=on,seal=on)"
        )


class GuestMemory:
    """All regions of one guest. It does not change: a new table makes a new one."""

    __slots__ = ("regions",)

    def __init__(self, layouts: Sequence[RegionLayout], descriptors: Sequence[int]) -> None:
        """Maps every region from its descriptor; InvalidInputError if one cannot be, or overlap."""
        if not 0 < len(layouts) <= MAX_REGIONS or len(layouts) != len(descriptors):
            raise InvalidInputError(
                f"{len(layouts)} memory regions with {len(descriptors)} descriptors; "
                f"1 to {MAX_REGIONS} with one each are possible"
            )
        by_address = sorted(layouts)
        for before, after in itertools.pairwise(by_address):
            if before.guest_address + before.size > after.guest_address:
                raise InvalidInputError(f"memory regions {before} and {after} overlap")
        regions = [Region(*pair) for pair in zip(layouts, descriptors, strict=True)]
        # The largest first: it is the one that nearly every address is in.
        self.regions = tuple(sorted(regions, key=lambda region: -region.size))

    def spans(self, address: int, size: int) -> list[memoryview]:
        """The bytes at a guest address; several pieces where a buffer goes on in the next region.

        Raises InvalidInputError if any byte is outside the regions.
        """
        found: list[memoryview] = []
        at, left = address, size
        while left:
            region = self._region_at(at)
            if region is None:
                raise InvalidInputError(f"{size} bytes at {address:#x} are not all guest memory")
            begin = at - region.guest_address
            length = min(left, region.size - begin)
            found.append(region.view[begin : begin + length])
            at += length
            left -= length
        return found

    def copy(self, address: int, size: int) -> bytes:
        """The bytes at a guest address as they are now; errors are those of ``spans``."""
        first = self.regions[0]
        begin = address - first.guest_address
        if begin >= 0 and begin + size <= first.size:
            return bytes(first.view[begin : begin + size])
        return b"".join(self.spans(address, size))

    def _region_at(self, address: int) -> Region | None:
        for region in self.regions:
            if region.guest_address <= address < region.guest_end:
                return region
        return None

    def at_user_address(self, address: int, size: int, *, alignment: int) -> memoryview:
        """The bytes at a front end's address, in one piece and aligned in memory.

        Raises InvalidInputError if they are not.
        """
        for region in self.regions:
            begin = address - region.user_address
            if begin >= 0 and begin + size <= region.size:
                if (region.file_offset + begin) % alignment:
                    raise InvalidInputError(f"ring at {address:#x} is not aligned to {alignment}")
                return region.view[begin : begin + size]
        raise InvalidInputError(f"ring at {address:#x}, {size} bytes, is not in one memory region")
