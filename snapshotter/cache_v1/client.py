"""A trio client of cache-v1, version 2, over a Unix socket (docs/protocol).

Users: the store (fetch, chunk_table) and the daemon (ping, prepare, open). What it promises: no
body reaches a caller before its digest was compared with the one that was asked for; at most
four connections; one repetition at most, on a fresh connection, of what may be repeated.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

import trio

from snapshotter.cache_v1.answers import chunk_answer, expect
from snapshotter.cache_v1.connection import Body, Connection, TransportError, connect
from snapshotter.cache_v1.protocol import (
    MAX_CHUNK_TABLE_BYTES,
    ChunkTable,
    Data,
    Done,
    Fetch,
    Open,
    Ping,
    Prepare,
    Prepared,
    Progress,
    Ready,
    Request,
)
from snapshotter.digest import format_digest, sha256
from snapshotter.errors import (
    BusyError,
    CorruptError,
    InvalidInputError,
    SnapshotterError,
    UnavailableError,
)
from snapshotter.names import CHUNK_SIZE, ContentName
from snapshotter.telemetry import Counters

MAX_CONNECTIONS = 4
READ_DEADLINE_S = 30.0
"""How long the server may take for each answer to a read."""
PREPARE_DEADLINE_S = 60.0
"""How long a prepare may go without a frame."""
INLINE_BYTES = 64 << 10
"""Larger bodies are digested in a thread (hashlib releases the GIL); these are done in place."""
_RETRY_PAUSE_S = 0.05
_BUSY_PAUSE_S = (0.02, 0.5)
"""The first and the longest; what is waited is half of it at least (10 to 500 ms)."""

_TELL_INTERVAL_S = 0.01
"""The loop hears of large chunks no more often: its turns take time from those who receive them."""

T = TypeVar("T")


class Receiver(Protocol):
    """Takes what a fetch brings, on the loop; ``sink`` and what it returns run in any thread."""

    def sink(self, digest: bytes) -> Callable[[Body], None]:
        """What to do with that chunk's verified bytes; it may block."""

    def finish(self, digest: bytes, error: SnapshotterError | None) -> None:
        """The chunk is done: its sink has returned, or ``error`` says why there is none."""

    def companion(self, name: ContentName, body: Body) -> None:
        """A whole object that nobody asked for, verified."""


class CacheClient:
    """Connections to one cache server, made as needed and used again while they live."""

    def __init__(
        self,
        socket_path: str | os.PathLike[str],
        *,
        token: str | None = None,
        counters: Counters | None = None,
    ) -> None:
        self._socket_path = os.fspath(socket_path)
        self._token = token
        self._counters = counters or Counters()
        self._slots = trio.Semaphore(MAX_CONNECTIONS)
        self._idle: list[Connection] = []

    def close(self) -> None:
        """Closes the idle connections; calls under way close theirs when they end."""
        while self._idle:
            self._idle.pop().close()

    async def ping(self) -> Ready:
        """The server's features; UnavailableError if it is not there."""
        return await self._simple("ping", Ping(), Ready)

    async def open(
        self,
        *,
        handle: str | None = None,
        chain: str | None = None,
        architecture: str,
        merge: bool = True,
        documents: bool = False,
    ) -> Prepared:
        """An image that was prepared before; NotFoundError if the server does not know it."""
        request = Open(
            handle=handle,
            chain=chain,
            architecture=architecture,
            merge=merge,
            documents=documents,
        )
        return await self._simple("open", request, Prepared)

    async def prepare(
        self,
        image: str,
        *,
        architecture: str,
        refresh: bool = False,
        merge: bool = True,
        authfile: str | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Prepared:
        """Has the server make an image ready; may take minutes, and says how far it is.

        Raises whatever the server says (AccessDeniedError, NotFoundError …), UnavailableError
        when it is silent for 60 s or goes away: a prepare is not repeated by itself.
        """
        request = Prepare(
            image=image,
            architecture=architecture,
            refresh=refresh,
            progress=True,  # silence would look like a server that is gone
            merge=merge,
            authfile=authfile,
        )

        async def attempt(connection: Connection) -> Prepared:
            await connection.ask(request, token=self._token)
            while isinstance(response := await connection.response(), Progress):
                if on_progress is not None:
                    on_progress(response)
            return expect(connection, response, Prepared)

        return await self._call(
            f"prepare {image}", attempt, patience_s=PREPARE_DEADLINE_S, is_repeatable=False
        )

    async def chunk_table(self, name: ContentName) -> bytes:
        """The chunk table of chunked content, its digest compared with the content id."""

        async def attempt(connection: Connection) -> bytes | bytearray:
            content = format_digest(name.content_id)
            await connection.ask(ChunkTable(content=content, size=name.size), token=self._token)
            data = expect(connection, await connection.response(), Data, more=True)
            if data.length > MAX_CHUNK_TABLE_BYTES:
                raise InvalidInputError(f"chunk table of {data.length} bytes")
            body = await connection.body(data.length)
            connection.end()
            return body

        table = bytes(await self._call(f"chunk_table {name}", attempt))
        if await _digest(table) != name.content_id:
            raise CorruptError(
                f"chunk table of {name} from the cache server at {self._socket_path}: "
                "its digest is not the content id; it was not used"
            )
        return table

    async def fetch(
        self,
        chunks: Sequence[bytes],
        receiver: Receiver,
        *,
        companions_bytes: int = 0,
        handle: str | None = None,
    ) -> None:
        """Has small chunks (raw digests, at most 256) brought to ``receiver``, each verified.

        Returns when the server has said everything, companions included. A chunk that fails
        alone is told to the receiver; an error raised here concerns all chunks not yet finished.
        """
        remaining = list(chunks)

        async def attempt(connection: Connection) -> None:
            request = Fetch(
                chunks=[format_digest(chunk) for chunk in remaining],
                companions_bytes=companions_bytes,
                handle=handle,
            )
            await connection.ask(request, token=self._token)
            while remaining:
                await self._receive_chunk(connection, remaining[0], receiver)
                del remaining[0]
            if companions_bytes:
                # Whoever waits for the chunks goes on before the companions are taken in.
                await trio.lowlevel.checkpoint()
            await self._receive_companions(connection, receiver)

        await self._call(f"fetch of {len(chunks)} chunks", attempt)

    async def fetch_large(self, chunks: Sequence[bytes], receiver: Receiver) -> None:
        """``fetch`` for large chunks: one thread receives, digests and keeps them all."""
        remaining = list(chunks)

        async def attempt(connection: Connection) -> None:
            loop = trio.lowlevel.current_trio_token()
            await connection.in_thread(
                lambda: self._exchange_large(connection, remaining, receiver, loop)
            )

        await self._call(f"fetch of {len(chunks)} large chunks", attempt)

    def _exchange_large(
        self,
        connection: Connection,
        remaining: list[bytes],
        receiver: Receiver,
        loop: trio.lowlevel.TrioToken,
    ) -> None:
        """In a thread; takes from ``remaining`` what is done, and tells the loop now and then."""
        taken: list[tuple[bytes, SnapshotterError | None]] = []

        def tell(told: list[tuple[bytes, SnapshotterError | None]]) -> None:
            connection.heard()
            for digest, error in told:
                receiver.finish(digest, error)

        request = Fetch(chunks=[format_digest(chunk) for chunk in remaining])
        connection.send(request, token=self._token)
        tell_at_s = time.monotonic() + _TELL_INTERVAL_S
        try:
            while remaining:
                taken.append((remaining[0], self._take_chunk(connection, remaining[0], receiver)))
                del remaining[0]
                if time.monotonic() > tell_at_s:
                    loop.run_sync_soon(tell, taken)
                    taken, tell_at_s = [], time.monotonic() + _TELL_INTERVAL_S
            expect(connection, connection.receive(), Done)
        finally:
            loop.run_sync_soon(tell, taken)

    def _take_chunk(
        self, connection: Connection, digest: bytes, receiver: Receiver
    ) -> SnapshotterError | None:
        """Receives a chunk, in a thread; what is wrong with it alone."""
        answer = chunk_answer(connection, connection.receive(), digest)
        if isinstance(answer, SnapshotterError):
            return answer
        with connection.chunk(answer) as body:
            try:
                self._hand_over(digest, body, receiver.sink(digest))
            except SnapshotterError as error:
                return error
        return None

    async def _receive_chunk(
        self, connection: Connection, digest: bytes, receiver: Receiver
    ) -> None:
        answer = chunk_answer(connection, await connection.response(), digest)
        if isinstance(answer, SnapshotterError):
            receiver.finish(digest, answer)
            return
        body = await connection.body(answer)
        try:
            self._hand_over(digest, body, receiver.sink(digest))
        except SnapshotterError as error:
            receiver.finish(digest, error)
        else:
            receiver.finish(digest, None)

    def _hand_over(self, digest: bytes, body: Body, sink: Callable[[Body], None]) -> None:
        if sha256(body) != digest:
            raise CorruptError(
                f"chunk {format_digest(digest)} from the cache server at {self._socket_path}: "
                "its bytes have another digest; they were not used"
            )
        sink(body)

    async def _receive_companions(self, connection: Connection, receiver: Receiver) -> None:
        while True:
            response = await connection.response()
            if isinstance(response, Done):
                connection.end()
                return
            data = expect(connection, response, Data, more=True)
            if not data.companion or data.object is None or data.length > CHUNK_SIZE:
                raise InvalidInputError(f"{data.length} bytes that nobody asked for")
            name = ContentName.parse_path(data.object)
            body = await connection.body(data.length)
            if name.size == len(body) and sha256(body) == name.content_id:
                receiver.companion(name, body)
            else:
                self._counters.add("companions_refused")

    async def _simple(self, op: str, request: Request, answer: type[T]) -> T:
        async def attempt(connection: Connection) -> T:
            await connection.ask(request, token=self._token)
            return expect(connection, await connection.response(), answer)

        return await self._call(op, attempt)

    async def _call(
        self,
        op: str,
        attempt: Callable[[Connection], Awaitable[T]],
        *,
        patience_s: float = READ_DEADLINE_S,
        is_repeatable: bool = True,
    ) -> T:
        """Runs an exchange on a connection by the rules on retries, deadlines and ``busy``."""
        may_retry = is_repeatable
        pause_s, longest_pause_s = _BUSY_PAUSE_S
        give_up_at = trio.current_time() + patience_s
        async with self._slots:
            while True:
                is_reused = bool(self._idle)
                connection: Connection | None = None
                try:
                    with trio.fail_after(patience_s):
                        connection = await self._connection()
                    return await self._exchange(connection, attempt, patience_s)
                except BusyError:
                    if trio.current_time() + pause_s > give_up_at:
                        raise
                    self._counters.add("busy_waits")
                    await trio.sleep(pause_s * random.uniform(0.5, 1))  # noqa: S311 - spreads load
                    pause_s = min(2 * pause_s, longest_pause_s)
                except TransportError as error:
                    self.close()  # the others of this age are as dead
                    if is_reused and connection is not None and not connection.has_heard:
                        continue  # the server had closed it while idle: that was not a try
                    if not may_retry:
                        raise self._unavailable(op, error) from error
                    may_retry = False
                    self._counters.add("retries")
                    await trio.sleep(_RETRY_PAUSE_S)
                except (TimeoutError, trio.TooSlowError) as error:
                    raise self._unavailable(
                        op, f"it did not answer within {patience_s:g} s"
                    ) from error
                except _ProtocolBreachError as error:
                    raise self._unavailable(op, f"it broke the protocol: {error}") from error

    async def _connection(self) -> Connection:
        if self._idle:
            connection = self._idle.pop()
            connection.has_heard = False
            return connection
        return await connect(self._socket_path)

    async def _exchange(
        self,
        connection: Connection,
        attempt: Callable[[Connection], Awaitable[T]],
        patience_s: float,
    ) -> T:
        """One exchange; the connection is kept if it ended in order, else closed."""
        connection.begin(patience_s)
        try:
            with connection.patience:
                return await attempt(connection)
            raise TimeoutError
        except InvalidInputError as error:
            # Ended in order, this is the server's own verdict on the request.
            if connection.has_ended:
                raise
            raise _ProtocolBreachError(str(error)) from error
        finally:
            if connection.has_ended:
                self._idle.append(connection)
            else:
                connection.close()

    def _unavailable(self, op: str, reason: object) -> UnavailableError:
        return UnavailableError(
            f"{op}: cache server at {self._socket_path}: {reason}; "
            "is the daemon, or `cache-server serve`, running?"
        )


class _ProtocolBreachError(Exception):
    """The peer sent what cache-v1 does not allow here."""


async def _digest(body: bytes) -> bytes:
    if len(body) > INLINE_BYTES:
        return await trio.to_thread.run_sync(sha256, body)
    return sha256(body)
