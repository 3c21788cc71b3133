"""Sparse files in tars: the four ways GNU tar says which parts of a file the archive holds.

Old GNU headers (type ``S``) carry the map themselves, in further blocks if need be; pax formats 0.0
and 0.1 in records, 1.0 in front of the data (GNU tar manual, "Storing Sparse Files"). What is
legal is what Go's archive/tar takes: regions in order, apart, within the file, and neither more
nor less data behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from cache_server.formats.tar_fields import parse_number, show
from snapshotter.errors import CorruptError, InvalidInputError
from snapshotter.names import CHUNK_SIZE, MAX_CONTENT_SIZE

MAX_REGIONS = 1 << 18
"""The longest map that is read; some 50 MB in memory."""

ZERO_CHUNK = memoryview(bytes(CHUNK_SIZE)).toreadonly()
"""Every whole chunk of a hole is this very object, so that it need be digested only once."""

_BLOCK_SIZE = 512
_NUMBER = 12
_KEY = b"GNU.sparse."
_MAJOR, _MINOR, _MAP = _KEY + b"major", _KEY + b"minor", _KEY + b"map"
Take = Callable[[int], memoryview | None]
"""Gives the next bytes of the archive, None where it ends before."""


class SparseMap(NamedTuple):
    """A file of ``size`` bytes, of which the archive holds ``regions``: (offset, length) pairs."""

    size: int
    regions: list[tuple[int, int]]

    @property
    def stored_bytes(self) -> int:
        """Bytes of all regions together."""
        return sum(length for _, length in self.regions)


def has_pax_map(pax: dict[bytes, bytes]) -> bool:
    """Whether pax records describe a sparse file in a version that is known, as Go decides it."""
    version = pax.get(_MAJOR), pax.get(_MINOR)
    if version == (None, None):
        return _MAP in pax
    return version in ((b"1", b"0"), (b"0", b"0"), (b"0", b"1"))


def read_pax_map(pax: dict[bytes, bytes], stored_size: int, take: Take) -> tuple[SparseMap, int]:
    """The map of a file whose records say ``has_pax_map``, and the bytes of data left behind it.

    ``stored_size`` is what the header says lies in the archive, a map of version 1.0 included.
    Raises InvalidInputError for an illegal map, CorruptError for one that is cut off.
    """
    size_text = pax.get(_KEY + b"size") or pax.get(_KEY + b"realsize")
    size = stored_size if size_text is None else _decimal(size_text)
    if pax.get(_MAJOR) == b"1":
        numbers, used = _read_text_map(take, stored_size)
    else:
        text = pax.get(_MAP, b"")
        numbers, used = [_decimal(part) for part in text.split(b",")] if text else [], 0
        count = _decimal(pax.get(_KEY + b"numblocks", b""))
        if len(numbers) != 2 * count:
            raise InvalidInputError(f"sparse map of {len(numbers)} numbers for {count} regions")
    if len(numbers) % 2:
        raise InvalidInputError(f"sparse map of {len(numbers)} numbers")
    left = stored_size - used
    regions = list(zip(numbers[::2], numbers[1::2], strict=True))
    return _checked(SparseMap(size, regions), left), left


def read_gnu_map(header: bytes, stored_size: int, take: Take) -> SparseMap:
    """The map of a type ``S`` header and of the blocks that continue it. Raises as read_pax_map."""
    size = parse_number(header[483:495], "real size")
    regions: list[tuple[int, int]] = []
    entries, is_extended = header[386:482], header[482]
    while True:
        for at in range(0, len(entries), 2 * _NUMBER):
            if not entries[at]:
                break
            offset = parse_number(entries[at : at + _NUMBER], "sparse offset")
            length = parse_number(entries[at + _NUMBER : at + 2 * _NUMBER], "sparse length")
            regions.append((offset, length))
        if not is_extended:
            return _checked(SparseMap(size, regions), stored_size)
        if len(regions) > MAX_REGIONS:
            raise InvalidInputError(f"sparse map of more than {MAX_REGIONS} regions")
        block = take(_BLOCK_SIZE)
        if block is None:
            raise CorruptError("truncated within a sparse map")
        entries, is_extended = bytes(block[:504]), block[504]


def expand(sparse: SparseMap, take: Take) -> Iterator[memoryview]:
    """The whole file in pieces of one chunk (the last one shorter); CorruptError if data lacks."""
    regions = iter(sparse.regions)
    offset, length = next(regions, (sparse.size, 0))
    for begin in range(0, sparse.size, CHUNK_SIZE):
        end = min(begin + CHUNK_SIZE, sparse.size)
        if offset >= end:
            yield ZERO_CHUNK if end - begin == CHUNK_SIZE else ZERO_CHUNK[: end - begin]
            continue
        piece = bytearray(end - begin)
        while offset < end:
            count = min(length, end - offset)
            data = take(count)
            if data is None:
                raise CorruptError("truncated in its content")
            piece[offset - begin : offset - begin + count] = data
            offset, length = offset + count, length - count
            if not length:
                offset, length = next(regions, (sparse.size, 0))
        yield memoryview(piece)


def _checked(sparse: SparseMap, stored_size: int) -> SparseMap:
    if not 0 <= sparse.size <= MAX_CONTENT_SIZE:
        raise InvalidInputError(f"size out of range: {sparse.size}")
    if len(sparse.regions) > MAX_REGIONS:
        raise InvalidInputError(f"sparse map of more than {MAX_REGIONS} regions")
    free_from = 0
    for offset, length in sparse.regions:
        if offset < free_from or length < 0 or offset + length > sparse.size:
            raise InvalidInputError(
                f"sparse region of {length} bytes at {offset} in a file of {sparse.size}"
            )
        free_from = offset + length
    if sparse.stored_bytes != stored_size:
        raise InvalidInputError(
            f"sparse map of {sparse.stored_bytes} bytes, but {stored_size} are in the archive"
        )
    return SparseMap(sparse.size, [region for region in sparse.regions if region[1]])


def _read_text_map(take: Take, stored_size: int) -> tuple[list[int], int]:
    """The numbers of a version 1.0 map, a count and as many pairs, and the bytes that they took."""
    numbers: list[int] = []
    wanted, used, rest = 1, 0, b""
    while len(numbers) < wanted:
        if used + _BLOCK_SIZE > stored_size + -stored_size % _BLOCK_SIZE:
            raise InvalidInputError("sparse map is longer than the content")
        block = take(_BLOCK_SIZE)
        if block is None:
            raise CorruptError("truncated within a sparse map")
        used += _BLOCK_SIZE
        *lines, rest = (rest + bytes(block)).split(b"\n")
        if len(rest) > _BLOCK_SIZE:
            raise InvalidInputError(f"sparse map with a line of {len(rest)} bytes")
        for line in lines[: wanted - len(numbers)] if numbers else lines:
            numbers.append(_decimal(line))
            if len(numbers) == 1:
                wanted = 1 + 2 * numbers[0]
                if numbers[0] > MAX_REGIONS:
                    raise InvalidInputError(f"sparse map of {numbers[0]} regions")
            if len(numbers) == wanted:
                break
    if used > stored_size:
        raise InvalidInputError("sparse map is longer than the content")
    return numbers[1:], used


def _decimal(text: bytes) -> int:
    if not text.isdigit() or len(text) > 19:
        raise InvalidInputError(f"sparse map: not a number: {show(text)}")
    return int(text)
