"""What both halves do with images, and what is open through them. Blocking, thread-safe."""

from __future__ import annotations

import threading
from pathlib import Path

from snapshotter.api.cancelling import Cancellation
from snapshotter.api.daemon import Daemon, image_name, view_request
from snapshotter.api.open_mount import OpenMount
from snapshotter.api.open_sandbox import OpenSandbox, parse_settings
from snapshotter.api.options import (
    ImageName,
    MountOptions,
    Name,
    PullOptions,
    SandboxOptions,
    text_of,
)
from snapshotter.authfiles import chosen_authfile
from snapshotter.errors import UnavailableError
from snapshotter.paths import default_paths
from snapshotter.service import control, placement
from snapshotter.service.requesting import architecture_of
from snapshotter.service.sandbox_link import SandboxHost, SandboxLink
from snapshotter.store.images import ImageRecord


class Core:
    """One daemon, and the mounts and sandboxes that were opened through this."""

    def __init__(self, root: Name | None, run: Name | None, config: Name | None) -> None:
        paths = default_paths(text_of(root), text_of(run))
        self.daemon = Daemon(paths, None if config is None else Path(config))
        self._lock = threading.Lock()
        self._host: SandboxHost | None = None
        self._open: set[OpenSandbox | OpenMount] = set()

    def connect(self) -> None:
        """Starts the daemon if it is not running."""
        self.daemon.connect().close()

    def pull(
        self, image: str, *, refresh: bool, options: PullOptions, cancellation: Cancellation
    ) -> ImageRecord:
        """Makes an image known: its record and metadata image, no content."""
        request = control.Pull(
            image=image_name(image),
            architecture=architecture_of(options.get("platform")),
            authfile=chosen_authfile(text_of(options.get("authfile"))),
            refresh=refresh,
        )
        answer = self.daemon.ask(
            request,
            control.Image,
            on_progress=options.get("on_progress"),
            cancellation=cancellation,
        )
        return answer.image

    def mount(
        self,
        image: ImageName,
        directory: Name | None,
        options: MountOptions,
        cancellation: Cancellation,
    ) -> OpenMount:
        """Mounts an image on a directory, by default on one of its own."""
        request = view_request(image, options)
        mount = OpenMount.make(
            self.daemon, request, directory, options, cancellation, on_end=self._forget
        )
        if mount.has_own_directory:
            with self._lock:
                self._open.add(mount)
        return mount

    def unmount(self, name: Name, *, lazy: bool) -> None:
        """Unmounts by id or directory."""
        with self.daemon.connect() as client:
            mounts = client.ask(control.ListMounts(), control.Mounts).mounts
            record = placement.find_mount(mounts, str(text_of(name)))
            placement.remove_and_tell(client, record, lazy=lazy)

    def open_sandbox(
        self, image: ImageName, options: SandboxOptions, cancellation: Cancellation
    ) -> OpenSandbox:
        """A sandbox with a view of an image as its root."""
        settings = parse_settings(options)
        request = view_request(image, options)
        cancellation.check()
        link = self._new_process()
        try:
            sandbox = OpenSandbox(self.daemon, settings, link, on_end=self._forget)
            sandbox.make(request, options.get("on_progress"), cancellation)
        except BaseException:
            link.close()
            raise
        with self._lock:
            self._open.add(sandbox)
        return sandbox

    def close(self) -> None:
        """Closes everything that is open, mounts on directories of others excepted."""
        with self._lock:
            left, self._open = self._open, set()
            host, self._host = self._host, None
        try:
            for each in left:
                each.close()
        finally:
            if host is not None:
                host.close()

    def _forget(self, ended: OpenSandbox | OpenMount) -> None:
        with self._lock:
            self._open.discard(ended)

    def _new_process(self) -> SandboxLink:
        """A sandbox's process, of a new host if there is none or it was killed."""
        with self._lock:
            if self._host is not None:
                try:
                    return self._host.open()
                except UnavailableError:
                    self._host.close()
            self._host = None
            host = SandboxHost(self.daemon.paths)
            try:
                link = host.open()
            except BaseException:
                host.close()
                raise
            self._host = host
            return link
