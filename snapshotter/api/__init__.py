"""The Python surface: images, mounts and sandboxes, for synchronous programs.

``connect`` is where to start; ``snapshotter.api.aio`` has the same names for asyncio and trio.
Both only talk to the daemon, and start it when it is not running. Errors are those of
``snapshotter.errors``.
"""

from snapshotter.api.client import Client, Mount, Process, Sandbox, connect
from snapshotter.api.command import Completed
from snapshotter.service.control import MountRecord, Progress, Running
from snapshotter.service.sandbox_spec import Volume
from snapshotter.store.images import ImageRecord

__all__ = [
    "Client",
    "Completed",
    "ImageRecord",
    "Mount",
    "MountRecord",
    "Process",
    "Progress",
    "Running",
    "Sandbox",
    "Volume",
    "connect",
]
