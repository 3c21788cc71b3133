"""What the store's process runs beside the store: the gates, one after the other, and control.

A gate's descriptor comes from the keeper as soon as there is one. The kernel is made to repeat
what a predecessor left unanswered; when that gate is unmounted the next is waited for.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import structlog
import trio

from snapshotter.config import Config
from snapshotter.errors import BusyError, SnapshotterError, UnavailableError, UnsupportedError
from snapshotter.fuse.dev_fuse import Session, resend
from snapshotter.fuse.server import Server
from snapshotter.fuse.wire import Header
from snapshotter.kernel_view import keeper_client
from snapshotter.kernel_view.gate import Gate
from snapshotter.kernel_view.keeper_client import Attachment
from snapshotter.kernel_view.node_journal import NodeJournal
from snapshotter.names import ContentName
from snapshotter.paths import Paths
from snapshotter.service.store_server import ResolvableEvents, ServedStore, StoreServer
from snapshotter.telemetry import Counters

_KEEPER_INTERVAL_S = 0.1

_log = structlog.get_logger()


class RunningStore(ServedStore, Protocol):
    """What this process needs of the store."""

    on_complete: Callable[[ContentName], None] | None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Fetches and settles until cancelled."""


async def serve(store: RunningStore, paths: Paths, config: Config, counters: Counters) -> None:
    """Runs everything of this process until SIGTERM, SIGINT or a client's ``stop``."""
    events = ResolvableEvents()
    store.on_complete = events.add
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:
            gates: list[Gate] = []

            async def forget_pages(names: list[ContentName]) -> None:
                for gate in gates:
                    await gate.drop_pages(names)

            server = StoreServer(
                store,
                events,
                counters,
                stop=nursery.cancel_scope.cancel,
                on_discarded=forget_pages,
            )
            await nursery.start(store.run)
            nursery.start_soon(events.run)
            nursery.start_soon(server.run, paths.store_socket)
            nursery.start_soon(_serve_gates, store, paths, config, counters, events, gates)
            async for number in signals:
                _log.info("ending", signal=signal.Signals(number).name)
                nursery.cancel_scope.cancel()
                break


async def _serve_gates(
    store: RunningStore,
    paths: Paths,
    config: Config,
    counters: Counters,
    events: ResolvableEvents,
    gates: list[Gate],
) -> None:
    """Serves one gate after the other; ``gates`` has the one that is served."""
    while True:
        attachment = await _attach(paths.keeper_socket)
        journal = NodeJournal(paths.run / "gate-nodes", attachment.gate_id)
        gate = Gate(store, journal, config=config, counters=counters, on_resolvable=events.add)
        try:
            resend(attachment.device)
        except UnsupportedError as error:
            _log.warning("takeover is incomplete", operation="resend", cause=str(error))
        except OSError as error:
            _log.warning("gate lost before it was served", operation="resend", cause=str(error))
        server = Server(gate.operations(), report_fault=_report_fault)
        _log.info("serving the gate")
        gates.append(gate)
        await gate.serve(Session(attachment.device, server))
        gates.clear()
        # Not on cancellation: the session's thread still reads from the descriptor then.
        attachment.close()
        journal.close()
        _log.info("the gate is unmounted")


async def _attach(keeper_socket: Path) -> Attachment:
    """Waits for a gate, and for a predecessor that is still ending."""
    is_told = False
    while True:
        try:
            return await trio.to_thread.run_sync(keeper_client.attach, keeper_socket)
        except (UnavailableError, BusyError) as error:
            if not is_told:
                _log.info("waiting for a gate", cause=str(error))
            is_told = True
        await trio.sleep(_KEEPER_INTERVAL_S)


def _report_fault(error: Exception, header: Header | None) -> None:
    is_unforeseen = not isinstance(error, SnapshotterError)
    _log.error(
        "FUSE request failed",
        operation=None if header is None else header.opcode,
        nodeid=None if header is None else header.nodeid,
        cause=str(error),
        exc_info=error if is_unforeseen else None,
    )
