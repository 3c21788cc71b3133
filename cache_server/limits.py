"""How large what an image says may become, so that a hostile one cannot use up the host."""

from __future__ import annotations

import msgspec


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
