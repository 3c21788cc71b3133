"""The daemon: ``python -m snapshotter.service.daemon --root R --run D [--config F]``.

It owns the control socket and the records of images and mounts, and starts and looks after the
other processes. Its end breaks nothing: views, gate, keeper and store go on, and the next daemon
takes them up. Started by the command line or by a service manager; logs JSON lines to stderr.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys
from pathlib import Path

import structlog
import trio

from snapshotter.cache_v1.client import CacheClient
from snapshotter.config import Config, load_config
from snapshotter.errors import SnapshotterError
from snapshotter.kernel_view.probe import probe
from snapshotter.names import ContentName
from snapshotter.paths import Paths, default_paths
from snapshotter.service import control
from snapshotter.service.backing import Backing, cache_socket
from snapshotter.service.control_server import Reply, serve_control
from snapshotter.service.images import ImageCatalog
from snapshotter.service.lending import Lending
from snapshotter.service.mounting import Mounting
from snapshotter.service.requests import Requests
from snapshotter.service.root import open_root
from snapshotter.telemetry import Counters, configure_logging

_log = structlog.get_logger()


class Daemon:
    """One daemon over a root that is open (see ``open_root``)."""

    def __init__(self, paths: Paths, config: Config, config_path: Path | None) -> None:
        self._paths = paths
        self._config = config
        self._abilities = probe(paths.root)
        self._backing = Backing(
            paths, config, config_path, has_kernel_view=not self._abilities.missing
        )
        self._counters = Counters()
        self._stopping = trio.Event()
        self._askers: list[Reply] = []
        if config.token is not None:
            _write_token(paths.run / "token", config.token)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves until told to stop (by a request or SIGTERM); started when it can be reached."""
        client = CacheClient(cache_socket(self._paths, self._config), token=self._config.token)
        async with trio.open_nursery() as nursery:
            catalog = ImageCatalog(self._paths.images, client, self._ensure, nursery)
            mounting = Mounting(self._paths, self._abilities, self._backing, nursery, self._config)
            await mounting.recover()
            requests = Requests(
                self._paths,
                self._abilities,
                catalog,
                mounting,
                self._backing,
                Lending(catalog, client, mounting, self._backing, self._abilities, self._counters),
                self._counters,
                self.stop,
            )
            processes = trio.CancelScope()
            nursery.start_soon(self._look_after_processes, processes)
            nursery.start_soon(mounting.follow_store)
            await nursery.start(serve_control, self._paths.control_socket, requests.handle)
            _log.info("serving", root=str(self._paths.root))
            task_status.started()
            await self._stopping.wait()
            await self._end(mounting, processes)
            nursery.cancel_scope.cancel()
        mounting.close()
        client.close()

    def stop(self, reply: Reply | None = None) -> None:
        """Begins the end; ``reply`` is told when everything has ended."""
        if reply is not None:
            self._askers.append(reply)
        self._stopping.set()

    async def _ensure(self, name: ContentName) -> None:
        await self._backing.wait_for_store()
        if not await trio.Path(self._paths.objects / name.path).exists():
            await self._backing.wait_for_cache_server()
        await self._backing.store.ensure(name)

    async def _look_after_processes(self, scope: trio.CancelScope) -> None:
        with scope:
            await self._backing.run()

    async def _end(self, mounting: Mounting, processes: trio.CancelScope) -> None:
        """Leaves what living mounts need; without any, ends everything and leaves no mount."""
        mounts = await mounting.list()
        pids = self._backing.pids(with_starting=True)
        processes.cancel()
        await mounting.clear_leftovers()
        if mounts:
            _log.info("ending; mounts stand and go on", mounts=len(mounts))
        else:
            await self._backing.stop(pids)
            _log.info("ending; nothing is left mounted")
        self._paths.control_socket.unlink(missing_ok=True)
        for reply in self._askers:
            try:
                await reply.send(control.Done())
            except trio.BrokenResourceError:
                _log.info("who asked for the stop did not wait for it")


async def _stop_on_signal(daemon: Daemon) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            _log.info("signal", number=number)
            daemon.stop()


async def _serve(paths: Paths, config: Config, config_path: Path | None) -> None:
    daemon = Daemon(paths, config, config_path)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_stop_on_signal, daemon)
        await daemon.run()
        nursery.cancel_scope.cancel()


def _write_token(path: Path, token: str) -> None:
    """For the cache server that we start: a token on its command line could be read by anyone."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w") as file:
        file.write(token)


def main(arguments: list[str] | None = None) -> int:
    """Runs the daemon; the exit code is that of the error which kept it from serving."""
    parser = argparse.ArgumentParser(prog="snapshotter.service.daemon", description=__doc__)
    parser.add_argument("--root", help="durable directory")
    parser.add_argument("--run", help="directory of sockets and logs")
    parser.add_argument("--config", type=Path, help="settings (default: config.toml in the root)")
    options = parser.parse_args(arguments)
    paths = default_paths(options.root, options.run)
    configure_logging("daemon")
    config_path = options.config.absolute() if options.config else paths.root / "config.toml"
    try:
        config = load_config(config_path)
        lock = open_root(paths)
    except (SnapshotterError, OSError) as error:
        _log.error("cannot start", error=str(error))
        return error.exit_code if isinstance(error, SnapshotterError) else 1
    os.chdir("/")  # no mount is kept busy by us
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        trio.run(_serve, paths, config, config_path)
    except OSError as error:
        _log.error("cannot run", error=f"{error}; if the disk is full, free some space first")
        return 1
    finally:
        os.close(lock)
    return 0


if __name__ == "__main__":
    sys.exit(main())
