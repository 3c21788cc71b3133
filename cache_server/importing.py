"""Imports an image into a root: by the server that runs on it, else in this process."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from pathlib import Path

from cache_server.library import Library
from cache_server.limits import IngestLimits
from cache_server.prepare import Preparer
from cache_server.root_lock import RootInUseError, RootLock
from cache_server.sources.network import NetworkSettings
from cache_server.sources.opening import Sources
from snapshotter.cache_v1 import protocol
from snapshotter.cache_v1.protocol import Prepare, Prepared, Progress, Response
from snapshotter.errors import InvalidInputError, SnapshotterError, UnavailableError
from snapshotter.framing import FrameDecoder, encode_frame

OnProgress = Callable[[Progress], None]
_ANSWER_TIMEOUT_S = 60.0
_START_PATIENCE_S = 5.0
_DEFAULT_LIMITS = IngestLimits()


def import_image(
    root: Path,
    request: Prepare,
    on_progress: OnProgress,
    *,
    token: str | None = None,
    limits: IngestLimits = _DEFAULT_LIMITS,
    network: NetworkSettings = NetworkSettings(),
) -> Prepared:
    """Prepares an image in ``root``; blocks until it is done.

    Raises what a prepare raises, BusyError while another import works on the root, and
    InvalidInputError for ``limits`` or ``network`` where a server does it, which has its own.
    """
    try:
        with RootLock(root):
            return asyncio.run(_import_here(root, request, on_progress, limits, network))
    except RootInUseError as busy:
        if busy.holder is None or busy.holder.socket is None:
            raise
        if (limits, network) != (_DEFAULT_LIMITS, NetworkSettings()):
            raise InvalidInputError(
                f"import {request.image}: a server runs on {root}, and its own limits and insecure"
                " registries count: give them to it (for the snapshotter's daemon by its settings"
                " limits and insecure_registries), or leave the options out"
            ) from busy
        return import_by_server(busy.holder.socket, request, on_progress, token=token)


def import_by_server(
    path: str, request: Prepare, on_progress: OnProgress, *, token: str | None = None
) -> Prepared:
    """Asks the server at ``path`` to prepare an image. Raises what it answers, UnavailableError
    where it does not.
    """
    try:
        with connect(path) as connection:
            connection.settimeout(_ANSWER_TIMEOUT_S)
            connection.sendall(encode_frame(protocol.encode_request(request, token=token)))
            return _await_prepared(connection, on_progress)
    except OSError as error:
        raise UnavailableError(f"import {request.image}: server on {path}: {error}") from error


def _await_prepared(connection: socket.socket, on_progress: OnProgress) -> Prepared:
    decoder = FrameDecoder()
    while True:
        match receive(connection, decoder):
            case Progress() as progress:
                on_progress(progress)
            case Prepared() as prepared:
                return prepared
            case other:
                raise SnapshotterError(f"unexpected answer to prepare: {type(other).__name__}")


def receive(connection: socket.socket, decoder: FrameDecoder) -> Response:
    """The server's next response, raised if it is an error; OSError if the server leaves."""
    while (frame := decoder.next_frame()) is None:
        data = connection.recv(1 << 16)
        if not data:
            raise ConnectionResetError("it closed the connection without an answer")
        decoder.feed(data)
    response = protocol.decode_response(frame)
    if isinstance(response, protocol.Error):
        raise protocol.error_from(response)
    return response


def connect(path: str) -> socket.socket:
    """Connects; a server that has only just taken its root gets a moment to listen."""
    give_up_at_s = time.monotonic() + _START_PATIENCE_S
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
            return connection
        except (ConnectionRefusedError, FileNotFoundError):
            connection.close()
            if time.monotonic() > give_up_at_s:
                raise
            time.sleep(0.05)


async def _import_here(
    root: Path,
    request: Prepare,
    on_progress: OnProgress,
    limits: IngestLimits,
    network: NetworkSettings,
) -> Prepared:
    sources = Sources(network)
    with Library(root) as library:
        preparer = Preparer(library, sources.open, limits=limits)
        try:
            preparation = preparer.start(request)
            while not (await asyncio.wait({preparation.task}, timeout=0.2))[0]:
                on_progress(preparation.progress)
            return preparation.task.result()
        finally:
            await preparer.aclose()
            await sources.aclose()
