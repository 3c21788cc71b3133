"""The Python surface for asyncio and trio: the same names, with ``await``.

``async with connect() as client`` is where to start. What is cancelled is ended before the
cancellation goes on: pulls, mounts, sandboxes and commands leave nothing behind.
"""

from snapshotter.api.aio.client import Client, Mount, Sandbox, connect
from snapshotter.api.aio.process import Process

__all__ = ["Client", "Mount", "Process", "Sandbox", "connect"]
