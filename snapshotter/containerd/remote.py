"""Remote layers by way of the daemon, and their merged images mounted where containerd finds them.

The daemon knows cache server, store and gate; this asks it, starting it when it is not running.
A merged image stands at ``<state>/metadata/<chain>`` in the mount namespace of this process, which
must be containerd's. It outlives this process; views that are mounted outlive it, too.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import structlog

from snapshotter.containerd.snapshots import MergedImage
from snapshotter.digest import format_digest, parse_digest
from snapshotter.errors import NotFoundError, SnapshotterError, UnavailableError
from snapshotter.kernel_view import syscalls
from snapshotter.paths import Paths
from snapshotter.service import control, views
from snapshotter.service.control_client import Answer, ControlClient
from snapshotter.service.daemon_process import connect_or_start
from snapshotter.service.images import metadata_name
from snapshotter.service.lending import chain_name

_log = structlog.get_logger()
_UNREACHABLE_S = 5.0


class DaemonLayers:
    """``RemoteLayers`` of the daemon of ``paths``; ``config`` is for one that has to be started.

    ``authfile`` holds credentials of registries. Safe from any thread.
    """

    def __init__(
        self, paths: Paths, places: Path, *, config: Path | None, authfile: str | None
    ) -> None:
        self._paths = paths
        self._places = places
        self._config = config
        self._authfile = authfile
        self._mounting = threading.Lock()
        self._idle: list[ControlClient] = []
        self._unreachable: UnavailableError | None = None
        self._unreachable_until = 0.0
        places.mkdir(mode=0o700, parents=True, exist_ok=True)

    def check(self, chain: str, image: str | None) -> None:
        """Returns if the chain can be mounted; raises what the daemon says.

        When something could not be reached the next layers of the image do not wait for it, too.
        """
        if self._unreachable is not None and time.monotonic() < self._unreachable_until:
            raise UnavailableError(f"{self._unreachable} (a moment ago)")
        request = control.CheckChain(chain=chain, image=image, authfile=self._authfile)
        try:
            self._ask(request, control.Done)
        except UnavailableError as error:
            self._unreachable = error
            self._unreachable_until = time.monotonic() + _UNREACHABLE_S
            raise

    def lend(self, chain: str, snapshot_id: str, *, read_only: bool) -> MergedImage:
        """The chain's merged image, its names mounted; raises what the daemon says."""
        request = control.Lend(chain=chain, mount_id=snapshot_id, read_only=read_only)
        lent = self._ask(request, control.Lent)
        place = self._place(chain)
        with self._mounting:
            if not os.path.ismount(place):
                self._mount(lent, place)
        return MergedImage(
            metadata=str(place),
            objects=str(self._paths.objects),
            arrivals=str(self._paths.arrivals),
            gate=str(self._paths.gate),
            image_number=lent.image.number,
            self_contained=lent.self_contained,
        )

    def close(self) -> None:
        """Ends the connections to the daemon."""
        while self._idle:
            self._idle.pop().close()

    def give_back(self, snapshot_id: str) -> None:
        """Tells the daemon, if it runs; one that is started later finds out at the next boot."""
        self._tell(control.Unmounted(id=snapshot_id), control.Done)

    def lent(self) -> set[str]:
        """Chain ids whose merged images are mounted, or were until a reboot."""
        return {format_digest(bytes.fromhex(name)) for name in os.listdir(self._places)}

    def retire(self, chain: str, *, forget: bool) -> None:
        """Unmounts the merged image: views keep what they are made of. Logs what does not work."""
        place = self._place(chain)
        try:
            with self._mounting:
                while os.path.ismount(place):
                    syscalls.umount(place, syscalls.MNT_DETACH)
                place.rmdir()
        except OSError as error:
            _log.error("merged image not unmounted", chain=chain, error=str(error))
            return
        if forget:
            self._tell(control.RemoveImage(image=chain_name(chain)), control.Removed)

    def _place(self, chain: str) -> Path:
        return self._places / parse_digest(chain).hex()

    def _mount(self, lent: control.Lent, place: Path) -> None:
        name = metadata_name(lent.image.prepared)
        try:
            place.mkdir(mode=0o700, exist_ok=True)
            image = self._paths.objects / name.path
            descriptor = views.mount_metadata(image, erofs_file=lent.erofs_file)
            try:
                syscalls.move_mount(descriptor, place)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise SnapshotterError(f"mount metadata image {name} at {place}: {error}") from error

    def _ask(self, request: control.Request, answer: type[Answer], *, start: bool = True) -> Answer:
        """The daemon's answer, on a connection that is kept."""
        daemon = self._connection(start=start)
        try:
            answered = daemon.ask(request, answer)
        except BaseException:
            daemon.close()
            raise
        self._idle.append(daemon)
        return answered

    def _connection(self, *, start: bool) -> ControlClient:
        while True:
            try:
                daemon = self._idle.pop()
            except IndexError:
                if not start:
                    return ControlClient(self._paths.control_socket)
                return connect_or_start(self._paths, config=self._config)
            if daemon.is_alive():
                return daemon
            daemon.close()

    def _tell(self, request: control.Request, answer: type[control.Done | control.Removed]) -> None:
        """What the daemon need not know, or not now: it is not started for it."""
        try:
            self._ask(request, answer, start=False)
        except NotFoundError:
            pass  # it knows already
        except SnapshotterError as error:
            _log.info("the daemon was not told", request=repr(request), error=str(error))
