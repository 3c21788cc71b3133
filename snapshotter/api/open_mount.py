"""A mounted image, from its making to its end. Blocking, thread-safe."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

from snapshotter.api.cancelling import Cancellation
from snapshotter.api.daemon import Daemon
from snapshotter.api.options import MountOptions, Name
from snapshotter.errors import NotFoundError, SnapshotterError
from snapshotter.service import control, placement


class OpenMount:
    """A view on a directory; on one of its own, the directory goes with it."""

    def __init__(
        self,
        daemon: Daemon,
        mounted: control.Mounted,
        *,
        has_own_directory: bool,
        on_end: Callable[[OpenMount], None],
    ) -> None:
        self._daemon = daemon
        self._on_end = on_end
        self.mounted = mounted
        self.has_own_directory = has_own_directory

    @classmethod
    def make(
        cls,
        daemon: Daemon,
        request: control.Mount,
        directory: Name | None,
        options: MountOptions,
        cancellation: Cancellation,
        *,
        on_end: Callable[[OpenMount], None],
    ) -> OpenMount:
        """Asks for the view and places it. ``on_end`` is told when it is gone."""
        target = tempfile.mkdtemp(prefix="snapshotter-") if directory is None else directory
        try:
            target = placement.check_target(os.fspath(target))
            cancellation.check()
            with daemon.connect() as client:
                with cancellation.ended_by(client.interrupt):
                    on_progress = options.get("on_progress")
                    mounted, view = client.mount(request, on_progress=on_progress)
                mounted.mount = placement.place_and_tell(
                    client,
                    mounted.mount,
                    view,
                    target,
                    nosuid=options.get("nosuid", False),
                    nodev=options.get("nodev", False),
                )
        except BaseException:
            if directory is None:
                os.rmdir(target)
            raise
        return cls(daemon, mounted, has_own_directory=directory is None, on_end=on_end)

    @property
    def path(self) -> str:
        """Where it stands."""
        assert self.mounted.mount.target is not None
        return self.mounted.mount.target

    def remove(self, *, lazy: bool) -> None:
        """Unmounts it; one that somebody unmounted counts as unmounted. Raises BusyError."""
        with self._daemon.connect() as client:
            try:
                placement.remove_and_tell(client, self.mounted.mount, lazy=lazy)
            except NotFoundError:
                pass
        self._on_end(self)
        if self.has_own_directory:
            try:
                os.rmdir(self.path)
            except FileNotFoundError:
                pass
            except OSError as error:
                raise SnapshotterError(
                    f"remove the directory of mount {self.mounted.mount.id}: {error}; what is on "
                    "it is not ours"
                ) from error

    def close(self) -> None:
        """Unmounts it, in use or not."""
        self.remove(lazy=True)
