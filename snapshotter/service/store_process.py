"""The store's process: the store, the gate in front of it, and its control socket.

``python -m snapshotter.service.store_process --root R --run D [--config F]``, started by the
daemon. SIGTERM and the control socket's ``stop`` end it in good order: unanswered requests stay
for its successor.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import structlog
import trio

from snapshotter.config import Config, load_config
from snapshotter.errors import SnapshotterError
from snapshotter.paths import Paths, default_paths
from snapshotter.service import store_service
from snapshotter.store.store import Store
from snapshotter.telemetry import Counters, configure_logging

_SWITCH_INTERVAL_S = 0.0001
"""Between the session's thread and the loop; with Python's 5 ms a request could wait that long."""

_log = structlog.get_logger()


async def _run(paths: Paths, config: Config) -> None:
    counters = Counters()
    with Store(paths, config, counters=counters) as store:
        await store_service.serve(store, paths, config, counters)


def main() -> int:
    """Runs the store's process; 0 after an orderly end."""
    parser = argparse.ArgumentParser(prog="snapshotter.service.store_process")
    parser.add_argument("--root", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--config", type=Path)
    options = parser.parse_args()
    configure_logging("store")
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        config = load_config(options.config)
        trio.run(_run, default_paths(options.root, options.run), config)
    except SnapshotterError as error:
        _log.error("cannot run", cause=str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
