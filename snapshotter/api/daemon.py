"""Asking the daemon. Blocking, thread-safe.

Each request has a connection of its own, so that threads never wait for one another's pull.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from snapshotter.api.cancelling import Cancellation
from snapshotter.api.options import ImageName, ProgressCallback, ViewOptions, text_of
from snapshotter.errors import NotFoundError, UnavailableError
from snapshotter.paths import Paths
from snapshotter.service import control
from snapshotter.service.control_client import ControlClient
from snapshotter.service.daemon_process import connect_or_start
from snapshotter.service.requesting import image_here, mount_request
from snapshotter.store.images import ImageRecord

Answer = TypeVar("Answer", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Daemon:
    """Where the daemon is, and the settings that it is started with."""

    paths: Paths
    config: Path | None

    def connect(self) -> ControlClient:
        """A connection to the daemon, which is started when it is not running."""
        return connect_or_start(self.paths, config=self.config)

    def ask(
        self,
        request: control.Request,
        answer: type[Answer],
        *,
        on_progress: ProgressCallback | None = None,
        cancellation: Cancellation,
    ) -> Answer:
        """The daemon's answer to one request."""
        cancellation.check()
        with self.connect() as client, cancellation.ended_by(client.interrupt):
            return client.ask(request, answer, on_progress=on_progress)

    def tell_end(self, mount_id: str) -> None:
        """Has the record of a mount that is gone dropped. A daemon that is not there finds out."""
        try:
            with ControlClient(self.paths.control_socket) as client:
                client.ask(control.Unmounted(id=mount_id), control.Done)
        except (NotFoundError, UnavailableError):
            pass


def image_name(image: ImageName) -> str:
    """An image as the daemon is asked for it."""
    return image.handle if isinstance(image, ImageRecord) else image_here(image)


def view_request(image: ImageName, options: ViewOptions) -> control.Mount:
    """A request for a view; raises what ``mount_request`` raises."""
    return mount_request(
        image_name(image),
        platform=options.get("platform"),
        authfile=text_of(options.get("authfile")),
        view=options.get("view", "auto"),
        upper=text_of(options.get("upper")),
        read_only=options.get("read_only", False),
        volatile=options.get("volatile", False),
    )
