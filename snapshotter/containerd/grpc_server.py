"""The Snapshots service over gRPC: messages in and out, errors told by gRPC's codes.

Handlers are thin: what they mean is in ``snapshots``. The server runs in threads of its own.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import structlog

from snapshotter.containerd.messages import MESSAGES, METHODS, SNAPSHOTS, Message, new
from snapshotter.containerd.metastore import Snapshot
from snapshotter.containerd.snapshots import Mount, Snapshots
from snapshotter.errors import (
    AccessDeniedError,
    BusyError,
    ExistsError,
    InvalidInputError,
    NotFoundError,
    SnapshotterError,
    UnavailableError,
    UnsupportedError,
)

_log = structlog.get_logger()
_THREADS = 32
"""A Prepare may wait for minutes while an image is made ready; others must not wait behind it."""
_LIST_PIECE = 100
_NS = 1_000_000_000
_CODES: dict[type[SnapshotterError], grpc.StatusCode] = {
    NotFoundError: grpc.StatusCode.NOT_FOUND,
    ExistsError: grpc.StatusCode.ALREADY_EXISTS,
    InvalidInputError: grpc.StatusCode.INVALID_ARGUMENT,
    BusyError: grpc.StatusCode.FAILED_PRECONDITION,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    UnsupportedError: grpc.StatusCode.UNIMPLEMENTED,
    AccessDeniedError: grpc.StatusCode.PERMISSION_DENIED,
}


def start_server(snapshots: Snapshots, path: Path) -> grpc.Server:
    """Serves ``snapshots`` on a Unix socket at ``path``, for this user alone; returns at once.

    Raises BusyError when somebody serves it already, and UnavailableError when it cannot be made.
    """
    if _answers(path):
        raise BusyError(
            f"socket {path}: another process serves it; each containerd needs a service of its own,"
            " with a --socket and a --state of its own"
        )
    server = grpc.server(ThreadPoolExecutor(_THREADS, thread_name_prefix="snapshots"))
    server.add_generic_rpc_handlers((_Handlers(snapshots).generic(),))
    mask = os.umask(0o177)
    try:
        path.unlink(missing_ok=True)
        server.add_insecure_port(f"unix:{path}")
    except (OSError, RuntimeError) as error:
        raise UnavailableError(f"listen on {path}: {error}; name another --socket") from error
    finally:
        os.umask(mask)
    server.start()
    return server


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return False
    return True


class _Handlers:
    """One method for each of the service's, named as it is there but for case."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots

    def generic(self) -> grpc.GenericRpcHandler:
        handlers = {name: self._handler(name) for name in METHODS[SNAPSHOTS]}
        return grpc.method_handlers_generic_handler(SNAPSHOTS, handlers)

    def _handler(self, name: str) -> grpc.RpcMethodHandler[Message, Message]:
        method = METHODS[SNAPSHOTS][name]
        do = getattr(self, name.lower())
        decode = MESSAGES[method.request].FromString
        if method.streams_responses:
            return grpc.unary_stream_rpc_method_handler(_streaming(name, do), decode, _encode)
        return grpc.unary_unary_rpc_method_handler(_answering(name, do), decode, _encode)

    def prepare(self, request: Message) -> Message:
        mounts = self._snapshots.prepare(request.key, request.parent, dict(request.labels))
        return new("PrepareSnapshotResponse", mounts=_mounts(mounts))

    def view(self, request: Message) -> Message:
        mounts = self._snapshots.view(request.key, request.parent, dict(request.labels))
        return new("ViewSnapshotResponse", mounts=_mounts(mounts))

    def mounts(self, request: Message) -> Message:
        return new("MountsResponse", mounts=_mounts(self._snapshots.mounts(request.key)))

    def commit(self, request: Message) -> Message:
        self._snapshots.commit(request.name, request.key, dict(request.labels))
        return new("Empty")

    def remove(self, request: Message) -> Message:
        self._snapshots.remove(request.key)
        return new("Empty")

    def stat(self, request: Message) -> Message:
        return new("StatSnapshotResponse", info=_info(self._snapshots.stat(request.key)))

    def update(self, request: Message) -> Message:
        info = request.info
        paths = list(request.update_mask.paths)
        changed = self._snapshots.update(info.name, dict(info.labels), paths)
        return new("UpdateSnapshotResponse", info=_info(changed))

    def list(self, request: Message) -> Iterator[Message]:
        found = [_info(each) for each in self._snapshots.find(list(request.filters))]
        for start in range(0, len(found), _LIST_PIECE):
            yield new("ListSnapshotsResponse", info=found[start : start + _LIST_PIECE])

    def usage(self, request: Message) -> Message:
        usage = self._snapshots.usage(request.key)
        return new("UsageResponse", size=usage.size_bytes, inodes=usage.inodes)

    def cleanup(self, _request: Message) -> Message:
        self._snapshots.reclaim()
        return new("Empty")


def _encode(message: Message) -> bytes:
    return message.SerializeToString()


def _answering(
    name: str, do: Callable[[Message], Message]
) -> Callable[[Message, grpc.ServicerContext], Message]:
    def answer(request: Message, context: grpc.ServicerContext) -> Message:
        try:
            return do(request)
        except Exception as error:
            _abort(context, name, error)
            raise

    return answer


def _streaming(
    name: str, do: Callable[[Message], Iterator[Message]]
) -> Callable[[Message, grpc.ServicerContext], Iterator[Message]]:
    def answer(request: Message, context: grpc.ServicerContext) -> Iterator[Message]:
        try:
            yield from do(request)
        except Exception as error:
            _abort(context, name, error)
            raise

    return answer


def _abort(context: grpc.ServicerContext, name: str, error: Exception) -> None:
    """Ends the call with the code and words of ``error``."""
    code = next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), None)
    if code is None:
        code = grpc.StatusCode.INTERNAL
        if isinstance(error, SnapshotterError | OSError):
            _log.error("call failed", call=name, error=str(error))
        else:
            _log.exception("call failed", call=name)
    elif code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.PERMISSION_DENIED):
        _log.warning("call failed", call=name, error=str(error))
    context.abort(code, str(error))


def _mounts(mounts: list[Mount]) -> list[Message]:
    return [
        new("Mount", type=each.type, source=each.source, options=each.options) for each in mounts
    ]


def _info(snapshot: Snapshot) -> Message:
    return new(
        "SnapshotInfo",
        name=snapshot.name,
        parent=snapshot.parent,
        kind=int(snapshot.kind),
        created_at=_timestamp(snapshot.created_ns),
        updated_at=_timestamp(snapshot.updated_ns),
        labels=dict(snapshot.labels),
    )


def _timestamp(time_ns: int) -> Message:
    return new("Timestamp", seconds=time_ns // _NS, nanos=time_ns % _NS)
