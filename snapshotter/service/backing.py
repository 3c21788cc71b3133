"""What stands behind the views: keeper, gate, store and cache server, in their right order."""

from __future__ import annotations

import math
import os
from pathlib import Path

import structlog
import trio

from snapshotter.config import Config
from snapshotter.errors import SnapshotterError, UnavailableError
from snapshotter.kernel_view import keeper_client
from snapshotter.paths import Paths
from snapshotter.service.frame_stream import peer_pid
from snapshotter.service.gate_mount import ensure_gate, remove_gate
from snapshotter.service.processes import (
    START_DEADLINE_S,
    Program,
    Supervisor,
    end_process,
    wait_for_end,
)
from snapshotter.service.store_client import StoreClient

_log = structlog.get_logger()
_STOP_DEADLINE_S = 5.0


class Backing:
    """Supervisors of the processes and the state of the gate, on the daemon's loop.

    ``has_kernel_view`` is false where the host cannot have one: then there is no gate.
    """

    def __init__(
        self, paths: Paths, config: Config, config_path: Path | None, *, has_kernel_view: bool
    ) -> None:
        self._paths = paths
        self._config = config
        self._has_kernel_view = has_kernel_view
        self._gate_lock = trio.Lock()
        self.gate_device: int | None = None
        self.store = StoreClient(paths.store_socket)
        self._keeper = Supervisor(_keeper_program(paths, config))
        self._store = Supervisor(_store_program(paths, config_path), before=self._before_store)
        self._cache_server = Supervisor(_cache_server_program(paths, config))

    async def run(self) -> None:
        """Looks after the processes and the gate until cancelled; they go on after it."""
        async with trio.open_nursery() as nursery:
            if self._has_kernel_view:
                nursery.start_soon(self._keeper.run)
                nursery.start_soon(self._watch_gate)
            nursery.start_soon(self._store.run)
            if self._config.cache_server == "auto":
                nursery.start_soon(self._cache_server.run)

    def pids(self, *, with_starting: bool = False) -> dict[str, int | None]:
        """The pid of each process (None: not up), if asked also of those that do not answer yet."""
        supervisors = [self._store]
        if self._has_kernel_view:
            supervisors.insert(0, self._keeper)
        if self._config.cache_server == "auto":
            supervisors.append(self._cache_server)
        return {
            each.program.name: each.pid or (each.starting_pid if with_starting else None)
            for each in supervisors
        }

    async def wait_for_store(self, deadline_s: float = START_DEADLINE_S) -> None:
        """Returns once the store answers (and its gate stands); UnavailableError otherwise."""
        await self._store.wait_until_up(deadline_s)
        if self._has_kernel_view and self.gate_device is None:
            await self._keeper.wait_until_up(deadline_s)
            await self.ensure_gate()

    async def wait_for_cache_server(self) -> None:
        """Returns once the cache server answers, where it is ours to start."""
        if self._config.cache_server == "auto":
            await self._cache_server.wait_until_up()

    async def wait_for_start(self) -> None:
        """Returns when our own cache server has come up for the first time, or could not.

        Who is given a view just after the start would else meet EIO at the first cold file.
        """
        if self._config.cache_server == "auto":
            with trio.move_on_after(START_DEADLINE_S):
                await self._cache_server.wait_until_tried()

    async def _before_store(self) -> None:
        """At first keeper and store start side by side: the store waits for its gate by itself."""
        if self._keeper.pid is not None:
            await self.ensure_gate()

    async def ensure_gate(self) -> bool:
        """A living gate; whether it had to be mounted anew.

        A store that serves a gate of the past is ended, to be started again. Raises
        UnavailableError while the keeper or the gate is being replaced.
        """
        async with self._gate_lock:
            gate = await trio.to_thread.run_sync(ensure_gate, self._paths, self._config)
            is_first = self.gate_device is None and self._store.is_started_here
            self.gate_device = gate.device
            if gate.is_new and not is_first:
                store = await trio.to_thread.run_sync(self._store.program.find)
                if store is not None:
                    await end_process(store)
        return gate.is_new

    async def _watch_gate(self) -> None:
        """Replaces the gate when the keeper died; ``before`` looks at it when the store did."""
        while True:
            await self._keeper.wait_until_up(deadline_s=math.inf)
            try:
                await self.ensure_gate()
            except (SnapshotterError, OSError) as error:
                _log.error("no gate", error=str(error))
                await trio.sleep(1)
            else:
                if (pid := self._keeper.pid) is not None:
                    await wait_for_end(pid)

    async def stop(self, pids: dict[str, int | None]) -> None:
        """Ends everything that ``pids`` names, in order, and unmounts the gate.

        For after ``run`` was cancelled. A cache server that somebody else started is left alone.
        """
        await self._stop_store(pids.get("store"))
        if self._has_kernel_view:
            async with self._gate_lock:  # one that is being mounted is finished first
                await self._stop_keeper(pids.get("keeper"))
                await trio.to_thread.run_sync(remove_gate, self._paths)
        server = pids.get("cache-server")
        if server is not None and self._started_cache_server(server):
            await end_process(server)

    async def _stop_store(self, pid: int | None) -> None:
        if pid is None:
            return
        with trio.move_on_after(_STOP_DEADLINE_S):
            try:
                await self.store.stop()
                await wait_for_end(pid)
                return
            except UnavailableError as error:
                _log.warning("store did not stop when asked", error=str(error))
        await end_process(pid)

    async def _stop_keeper(self, pid: int | None) -> None:
        if pid is None:
            return
        try:
            await trio.to_thread.run_sync(keeper_client.stop, self._paths.keeper_socket)
        except SnapshotterError as error:
            _log.warning("keeper did not stop when asked", error=str(error))
        await end_process(pid)

    def _started_cache_server(self, pid: int) -> bool:
        """Whether a daemon of this root started it: it has the command line that we give."""
        try:
            raw = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False
        ours = [os.fsencode(word) for word in self._cache_server.program.arguments]
        return raw.rstrip(b"\0").split(b"\0")[-len(ours) :] == ours


def cache_socket(paths: Paths, config: Config) -> Path:
    """Where the cache server is asked."""
    return Path(config.cache_socket) if config.cache_socket else paths.cache_socket


def _keeper_program(paths: Paths, config: Config) -> Program:
    def find() -> int | None:
        try:
            return keeper_client.status(paths.keeper_socket).pid
        except UnavailableError:
            return None

    patience = f"{config.keeper_patience_s:g}"
    arguments = ("snapshotter.kernel_view.keeper", "--socket", str(paths.keeper_socket))
    return Program("keeper", (*arguments, "--patience", patience), paths.log("keeper"), find)


def _store_program(paths: Paths, config_path: Path | None) -> Program:
    arguments = ["snapshotter.service.store_process"]
    arguments += ["--root", str(paths.root), "--run", str(paths.run)]
    if config_path is not None:
        arguments += ["--config", str(config_path)]
    return Program("store", arguments, paths.log("store"), lambda: peer_pid(paths.store_socket))


def _cache_server_program(paths: Paths, config: Config) -> Program:
    path = cache_socket(paths, config)
    arguments = ["cache_server", "serve", "--root", str(paths.server_root), "--socket", str(path)]
    if config.token is not None:
        arguments += ["--token-file", str(paths.run / "token")]
    for registry in config.insecure_registries:
        arguments += ["--insecure-registry", registry]
    for limit in config.limits:
        arguments += ["--limit", limit]
    return Program("cache-server", arguments, paths.log("cache-server"), lambda: peer_pid(path))
