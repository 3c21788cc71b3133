"""Turns ingested layers into the metadata image of what they add up to."""

from __future__ import annotations

import stat

from cache_server.library import Library
from cache_server.limits import IngestLimits
from snapshotter.cache_v1.protocol import Totals
from snapshotter.names import ContentName
from snapshotter.projection.image_writer import write_image
from snapshotter.projection.merge import MergeBudget, merge_layers
from snapshotter.projection.tree import Inode, walk

_DEFAULT_LIMITS = IngestLimits()


def merge_image(
    library: Library, diff_ids: list[str], limits: IngestLimits = _DEFAULT_LIMITS
) -> tuple[ContentName, Totals]:
    """Merges layers (lowest first) and adds the metadata image to the library; CPU-heavy.

    Raises InvalidInputError where a layer does not fit what lies below it, and for an image that
    exceeds ``limits``.
    """
    budget = MergeBudget(max_depth=limits.path_depth, names=limits.image_entries)
    root = merge_layers((library.layer_entries(diff_id) for diff_id in diff_ids), budget)
    return library.add_content(write_image(root)), count_files(root)


def count_files(root: Inode) -> Totals:
    """Regular files of a tree and the bytes in them; a hard-linked file counts once."""
    sizes = {id(inode): inode.size for _, inode in walk(root) if stat.S_ISREG(inode.mode)}
    return Totals(len(sizes), sum(sizes.values()))
