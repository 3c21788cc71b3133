"""The process that containerd talks to: state, core and gRPC server, until a signal ends it.

Its end unmounts nothing: what it mounted, and what containerd did, goes on without it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from snapshotter.containerd.grpc_server import start_server
from snapshotter.containerd.remote import DaemonLayers
from snapshotter.containerd.snapshots import Snapshots
from snapshotter.containerd.state import State
from snapshotter.errors import UnsupportedError
from snapshotter.paths import Paths
from snapshotter.service.daemon_process import make_run_directory
from snapshotter.telemetry import Counters

_log = structlog.get_logger()
_RECLAIM_EVERY_S = 60.0
"""containerd asks for a Cleanup after each collection; this is for what was in use then."""
_GRACE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What ``snapshotter containerd serve`` serves. ``config`` is for a daemon that it starts."""

    paths: Paths
    state: Path
    socket: Path
    config: Path | None = None
    authfile: str | None = None


def serve(service: Service, *, on_ready: Callable[[], None] = lambda: None) -> None:
    """Serves until SIGTERM or SIGINT; ``on_ready`` is called once the socket can be reached.

    Raises BusyError when another process has the state or the socket, UnsupportedError without
    root, and what opening the state raises.
    """
    if os.geteuid() != 0:
        raise UnsupportedError("serve containerd: it needs root, as containerd does")
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    make_run_directory(service.paths.run)
    service.socket.parent.mkdir(parents=True, exist_ok=True)
    os.chdir("/")  # no mount is kept busy by us
    state = State(service.state)
    try:
        counters = Counters()
        layers = DaemonLayers(
            service.paths, state.metadata, config=service.config, authfile=service.authfile
        )
        snapshots = Snapshots(state.records, state.directories, layers, counters)
        server = start_server(snapshots, service.socket)
        _log.info("serving", socket=str(service.socket), state=str(service.state))
        on_ready()
        _reclaim(snapshots)
        while not ended.wait(_RECLAIM_EVERY_S):
            _reclaim(snapshots)
        server.stop(_GRACE_S).wait()
        layers.close()
        service.socket.unlink(missing_ok=True)
        _log.info("ending; what is mounted goes on", **counters.snapshot())
    finally:
        state.close()


def _reclaim(snapshots: Snapshots) -> None:
    try:
        snapshots.reclaim()
    except Exception:  # noqa: BLE001 - the next round may fare better; the service must go on
        _log.exception("could not clean up")
