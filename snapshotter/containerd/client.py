"""A blocking client of containerd's own API, for the command line and for tests.

It knows the methods of ``messages`` and turns gRPC's codes into errors of ours; what the calls
mean is for its users to know.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from snapshotter.containerd.messages import MESSAGES, METHODS, Message, Method
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

T = TypeVar("T")
DEFAULT_ADDRESS = "/run/containerd/containerd.sock"
CALL_TIMEOUT_S = 120.0
"""How long a call may take. A Prepare waits until the snapshotter has the layer's names."""
_MAX_MESSAGE_BYTES = 16 << 20
"""What containerd itself allows (defaults.DefaultMaxRecvMsgSize)."""
_ERRORS: dict[grpc.StatusCode, type[SnapshotterError]] = {
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: ExistsError,
    grpc.StatusCode.FAILED_PRECONDITION: BusyError,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidInputError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: UnavailableError,
    grpc.StatusCode.UNIMPLEMENTED: UnsupportedError,
    grpc.StatusCode.PERMISSION_DENIED: AccessDeniedError,
    grpc.StatusCode.UNAUTHENTICATED: AccessDeniedError,
}


class ContainerdClient:
    """Calls to the containerd at ``address`` for one of its namespaces; closes with its context.

    ``lease``, once set, is the lease that keeps what the calls make from being collected.
    """

    def __init__(self, address: str | os.PathLike[str], namespace: str) -> None:
        self.address = os.fspath(address).removeprefix("unix://")
        self.namespace = namespace
        self.lease: str | None = None
        limits = [
            ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
            ("grpc.use_local_subchannel_pool", 1),  # a new client tries at once
        ]
        self._channel = grpc.insecure_channel(f"unix://{self.address}", options=limits)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()

    def call(self, service: str, method: str, **fields: object) -> Message:
        """The answer to a call that streams nothing; ``fields`` are those of its request."""
        found = METHODS[service][method]
        answers = self._answers(self._channel.unary_unary, service, method, found)
        request = MESSAGES[found.request](**fields)
        answer: Message = self._translated(service, method, lambda: answers(request))
        return answer

    def stream(self, service: str, method: str, **fields: object) -> list[Message]:
        """All answers to a call that streams its answers."""
        found = METHODS[service][method]
        answers = self._answers(self._channel.unary_stream, service, method, found)
        request = MESSAGES[found.request](**fields)
        return self._translated(service, method, lambda: list(answers(request)))

    def exchange(
        self, service: str, method: str, requests: Iterable[dict[str, object]]
    ) -> list[Message]:
        """All answers to a call that streams both ways, when every request was sent."""
        found = METHODS[service][method]
        answers = self._answers(self._channel.stream_stream, service, method, found)
        sent = [MESSAGES[found.request](**fields) for fields in requests]
        return self._translated(service, method, lambda: list(answers(iter(sent))))

    def _answers(
        self, kind: Callable[..., Any], service: str, method: str, found: Method
    ) -> Callable[[Message | Iterator[Message]], Any]:
        stub = kind(
            f"/{service}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=MESSAGES[found.response].FromString,
        )
        metadata = [("containerd-namespace", self.namespace)]
        if self.lease is not None:
            metadata.append(("containerd-lease", self.lease))
        return lambda request: stub(request, timeout=CALL_TIMEOUT_S, metadata=metadata)

    def _translated(self, service: str, method: str, run: Callable[[], T]) -> T:
        try:
            return run()
        except grpc.RpcError as error:
            kind = _ERRORS.get(error.code(), SnapshotterError)
            what = f"{service.rpartition('.')[2]}.{method} of containerd at {self.address}"
            advice = "; is it running, and this its address?" if kind is UnavailableError else ""
            raise kind(f"{what}: {error.details()}{advice}") from error
