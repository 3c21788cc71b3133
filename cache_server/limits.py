"""How large what an image says may become, so that a hostile one cannot use up the host."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from snapshotter.errors import InvalidInputError

_UNITS = {"k": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class IngestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on layers and images; generous, since real images are large. All must be positive."""

    layer_entries: int = 4_000_000
    """Entries in one layer's tar."""
    image_entries: int = 8_000_000
    """Names in a merged image, each counted in every layer that has it."""
    layer_bytes: int = 1 << 40
    """Decompressed bytes of one layer; also the bytes of its files, holes included."""
    expansion_ratio: int = 1_100
    """Decompressed to compressed bytes. Deflate cannot exceed 1,032, zstd can by far."""
    expansion_floor_bytes: int = 64 << 20
    """Decompressed bytes up to which no ratio is refused."""
    extension_bytes: int = 1 << 20
    """One pax header or GNU long name; Go's archive/tar has the same limit."""
    xattr_bytes: int = 256 << 10
    """Names and values of one entry's extended attributes."""
    names_bytes: int = 2 << 30
    """Paths, link targets and extended attributes of one layer's entries."""
    path_bytes: int = 4_095
    """One path; Linux takes none that is longer."""
    path_depth: int = 2_048
    """Directories above an entry, links resolved."""

    def __post_init__(self) -> None:
        """Refuses what is not positive."""
        for name in self.__struct_fields__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive")


def parse_limits(settings: Iterable[str]) -> IngestLimits:
    """Limits as ``NAME=NUMBER`` each, the others as by default; InvalidInputError says what can be.

    A number may end with k, M, G or T (powers of 1024).
    """
    given = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        unit = _UNITS.get(text[-1:], 1)
        digits = text[:-1] if unit > 1 else text
        is_number = digits.isascii() and digits.isdigit() and len(digits) < 20
        if name not in IngestLimits.__struct_fields__ or not is_number or not int(digits):
            raise InvalidInputError(
                f"limit {setting[:100]!r}: write NAME=NUMBER, positive, with one of the names "
                + ", ".join(IngestLimits.__struct_fields__)
            )
        given[name] = int(digits) * unit
    return IngestLimits(**given)
