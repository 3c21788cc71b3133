"""A Unix-socket relay before a cache server that counts what clients ask for and what comes back.

Counting on the wire needs no help from either side, so it also sees what their own counters miss.
Answers can be held back, so that a test acts while a reader is known to wait for one.
"""

import contextlib
import json
import socket
import threading
from collections import Counter
from pathlib import Path

from snapshotter.framing import FrameDecoder

_RECEIVE_BYTES = 1 << 18
_DEADLINE_S = 30.0


class CountingProxy:
    """Relays ``path`` to the server at ``server``; a context manager."""

    def __init__(self, path: Path, server: Path) -> None:
        self.path = path
        self._server = server
        self._lock = threading.Lock()
        self._asked = threading.Condition(self._lock)
        self._flowing = threading.Event()
        self._flowing.set()
        self._requests: Counter[str] = Counter()
        self._chunks = 0
        self._received = 0
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)

    def __enter__(self) -> "CountingProxy":
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._flowing.set()
        with self._lock:
            open_sockets = [self._listener, *self._sockets]
        for one in open_sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in open_sockets:
            one.close()

    @property
    def requests(self) -> Counter[str]:
        """How often each op was asked for, so far."""
        with self._lock:
            return Counter(self._requests)

    @property
    def content_requests(self) -> int:
        """Requests for content: chunks and chunk tables."""
        counts = self.requests
        return counts["fetch"] + counts["chunk_table"]

    @property
    def fetched_chunks(self) -> int:
        """How many chunks were asked for, repeats included."""
        with self._lock:
            return self._chunks

    def hold_answers(self) -> None:
        """From now on requests reach the server and answers wait here."""
        self._flowing.clear()

    def release_answers(self) -> None:
        """Lets held answers, and all later ones, go on."""
        self._flowing.set()

    def await_content_request(self, beyond: int) -> None:
        """Waits until there were more than ``beyond`` content requests in all."""

        def is_beyond() -> bool:
            return self._requests["fetch"] + self._requests["chunk_table"] > beyond

        with self._asked:
            if not self._asked.wait_for(is_beyond, _DEADLINE_S):
                raise TimeoutError(f"no content request beyond {beyond}: {self._requests}")

    @property
    def received_bytes(self) -> int:
        """Everything the server sent, frames included."""
        with self._lock:
            return self._received

    def _start(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            try:
                server.connect(str(self._server))
            except OSError:  # the server is away: the client sees a closed connection
                server.close()
                client.close()
                continue
            with self._lock:
                self._sockets += [client, server]
            self._start(self._relay_requests, client, server)
            self._start(self._relay_answers, server, client)

    def _relay_requests(self, client: socket.socket, server: socket.socket) -> None:
        decoder = FrameDecoder()
        while data := _receive(client):
            decoder.feed(data)
            while (frame := decoder.next_frame()) is not None:
                self._count(json.loads(frame)["request"])
            if not _send(server, data):
                break
        _shut(server)

    def _relay_answers(self, server: socket.socket, client: socket.socket) -> None:
        while data := _receive(server):
            with self._lock:
                self._received += len(data)
            self._flowing.wait()
            if not _send(client, data):
                break
        _shut(client)

    def _count(self, request: dict[str, object]) -> None:
        chunks = request.get("chunks", [])
        with self._asked:
            self._asked.notify_all()
            self._requests[str(request["op"])] += 1
            self._chunks += len(chunks) if isinstance(chunks, list) else 0


def _receive(one: socket.socket) -> bytes:
    try:
        return one.recv(_RECEIVE_BYTES)
    except OSError:
        return b""


def _send(one: socket.socket, data: bytes) -> bool:
    try:
        one.sendall(data)
    except OSError:
        return False
    return True


def _shut(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
