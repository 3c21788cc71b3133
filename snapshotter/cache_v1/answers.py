"""What a client may be answered, told apart from errors and breaches of the protocol."""

from __future__ import annotations

from typing import TypeVar

from snapshotter.cache_v1.connection import Connection
from snapshotter.cache_v1.protocol import Data, Error, Response, error_from
from snapshotter.digest import format_digest
from snapshotter.errors import InvalidInputError, SnapshotterError
from snapshotter.names import CHUNK_SIZE

T = TypeVar("T")


def expect(connection: Connection, response: object, kind: type[T], *, more: bool = False) -> T:
    """``response`` if it is of that kind; raises the error it stands for, or InvalidInputError.

    Unless ``more`` follows, the exchange has ended with it.
    """
    if isinstance(response, kind):
        if not more:
            connection.end()
        return response
    if isinstance(response, Error) and response.chunk is None:
        connection.end()
        raise error_from(response)
    raise InvalidInputError(f"unexpected {type(response).__name__.lower()}")


def chunk_answer(
    connection: Connection, response: Response, digest: bytes
) -> int | SnapshotterError:
    """The length of the body that follows, or what is wrong with that chunk alone."""
    text = format_digest(digest)
    if isinstance(response, Error) and response.chunk == text:
        return error_from(response)
    data = expect(connection, response, Data, more=True)
    if data.chunk != text or data.length > CHUNK_SIZE:
        raise InvalidInputError(f"{data.length} bytes of {data.chunk} instead of chunk {text}")
    return data.length
