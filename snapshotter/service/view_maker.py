"""Chooses between the views that this host allows, and makes one. Making blocks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from snapshotter.config import Config
from snapshotter.errors import UnsupportedError
from snapshotter.fuse.virtiofs.vring import is_supported_machine
from snapshotter.kernel_view.probe import Abilities
from snapshotter.names import ContentName
from snapshotter.paths import Paths
from snapshotter.service import fuse_views, uppers, views
from snapshotter.service.images import metadata_name
from snapshotter.service.uppers import UpperRecord
from snapshotter.store.images import ImageRecord


@dataclass(frozen=True, slots=True)
class Plan:
    """A mount to be made. ``directory`` is that of its upper, private or the user's."""

    mount_id: str
    image: ImageRecord
    view: str
    directory: Path | None
    is_private: bool
    volatile: bool
    read_only: bool

    @property
    def name(self) -> str:
        """The image, for people."""
        return name_of(self.image)

    @property
    def upper_record(self) -> UpperRecord:
        """What an upper made for this belongs to."""
        assert self.image.prepared.metadata_image is not None
        return UpperRecord(
            metadata_image=self.image.prepared.metadata_image.content, image=self.name
        )


def name_of(image: ImageRecord) -> str:
    """An image, for people."""
    return image.references[-1] if image.references else image.handle


class MadeView(NamedTuple):
    """The descriptor of a detached mount, and the pid of the process behind it if it has one."""

    descriptor: int
    server_pid: int | None


def virtiofs_missing() -> str:
    """Why no view can be served to a virtual machine here; empty when one can."""
    if is_supported_machine():
        return ""
    return "virtqueues are served on x86-64 only"


class ViewMaker:
    """Makes views below one root."""

    def __init__(self, paths: Paths, abilities: Abilities, config: Config) -> None:
        self._paths = paths
        self._abilities = abilities
        self._config = config
        self._metadata = views.MetadataMounts(paths, abilities)

    def close(self) -> None:
        """Lets go of the metadata images; views stay."""
        self._metadata.close()

    def release(self, metadata: ContentName) -> None:
        """Lets go of a metadata image that no record needs any more."""
        self._metadata.release(metadata)

    def choose(self, wanted: str) -> tuple[str, str]:
        """The view to make and why this one; UnsupportedError when there can be none such."""
        kernel = "; ".join(
            f"{each.name}: {each.detail}. {each.remedy}" for each in self._abilities.missing
        )
        fuse = fuse_views.missing()
        if wanted == "auto":
            if not kernel:
                return "kernel", "kernel is the fastest view and works on this host"
            if not fuse:
                return "fuse", f"the kernel view is impossible here ({kernel}); fuse works"
            raise UnsupportedError(f"view: this host allows none: {kernel}; {fuse}")
        if wanted == "virtiofs":
            if lacking := virtiofs_missing():
                raise UnsupportedError(f"view virtiofs: {lacking}")
            return wanted, "virtiofs was asked for"
        if lacking := kernel if wanted == "kernel" else fuse:
            raise UnsupportedError(f"view {wanted}: this host lacks something: {lacking}")
        return wanted, f"{wanted} was asked for"

    def make(self, plan: Plan) -> MadeView:
        """A new view; raises SnapshotterError when the host or the upper refuses it."""
        if plan.view == "fuse":
            return self._make_fuse(plan)
        if plan.view == "virtiofs":
            return self._make_virtiofs(plan)
        image = plan.image
        metadata = self._metadata.mount(metadata_name(image.prepared))
        upper = None
        if plan.directory is not None:
            upper = uppers.prepare(plan.directory, plan.upper_record, metadata)
        descriptor = views.make_view(
            self._paths,
            self._abilities,
            mount_id=plan.mount_id,
            metadata=metadata,
            image_number=image.number,
            upper=upper,
            volatile=plan.volatile,
            read_only=plan.read_only,
        )
        return MadeView(descriptor, None)

    def _make_fuse(self, plan: Plan) -> MadeView:
        made = fuse_views.make_fuse_view(
            self._paths,
            self._config,
            mount_id=plan.mount_id,
            metadata=metadata_name(plan.image.prepared),
            image_number=plan.image.number,
            upper=plan.directory,
            upper_record=plan.upper_record,
            volatile=plan.volatile,
            read_only=plan.read_only,
        )
        return MadeView(made.descriptor, made.pid)

    def _make_virtiofs(self, plan: Plan) -> MadeView:
        """Its owner serves it: all that is made here is the upper, and opened the metadata image.

        The image's descriptor takes the place of a mount's.
        """
        metadata = metadata_name(plan.image.prepared)
        if plan.directory is not None:
            fuse_views.prepare_upper(self._paths, metadata, plan.directory, plan.upper_record)
        return MadeView(os.open(self._paths.objects / metadata.path, os.O_RDONLY), None)
