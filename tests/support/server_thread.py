"""A fake cache server on a trio loop of its own, for tests whose own thread blocks."""

import threading
from collections.abc import Callable
from pathlib import Path

import trio

from tests.support.fake_cache_server import FakeCacheServer


class ServerThread:
    """A fake cache server that serves until ``close``."""

    def __init__(self, socket_path: Path) -> None:
        self.server = FakeCacheServer(socket_path)
        self._token: trio.lowlevel.TrioToken | None = None
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._run,))
        self._thread.start()
        assert self._is_ready.wait(10)

    async def _run(self) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(self.server.serve)
            self._token = trio.lowlevel.current_trio_token()
            self._is_ready.set()

    def hold(self) -> None:
        """No request is answered from now on."""
        self._call(lambda: setattr(self.server, "gate", trio.Event()))

    def release(self) -> None:
        """Answers what waits."""

        def open_gate() -> None:
            assert self.server.gate is not None
            self.server.gate.set()
            self.server.gate = None

        self._call(open_gate)

    def close(self) -> None:
        """Ends it."""
        self._call(self.server.stop)
        self._thread.join(10)

    def _call(self, change: Callable[[], None]) -> None:
        trio.from_thread.run_sync(change, trio_token=self._token)
