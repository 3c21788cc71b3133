"""A scripted HTTP server on loopback, for faults that a real registry does not produce."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(slots=True)
class Reply:
    """What to answer. ``cut_at`` ends the connection after that many bytes of the body; with
    ``stalls`` it is left open there until the server ends.
    """

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    cut_at: int | None = None
    stalls: bool = False


@dataclass(slots=True)
class Seen:
    """A request as it arrived."""

    path: str
    headers: Mapping[str, str]
    method: str = "GET"
    body: bytes = b""


class ScriptedServer:
    """Answers each GET and POST by calling ``answer``; remembers the requests in ``seen``.

    With a ``context`` it speaks TLS. A request to it as a proxy has a whole URL for a path.
    """

    def __init__(
        self, answer: Callable[[Seen], Reply], context: ssl.SSLContext | None = None
    ) -> None:
        self.answer = answer
        self._ending = threading.Event()
        self._connections: list[socket.socket] = []
        self.seen: list[Seen] = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
                request = Seen(self.path, dict(self.headers.items()), self.command, body)
                owner.seen.append(request)
                reply = owner.answer(request)
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(reply.body)))
                self.end_headers()
                self.wfile.write(reply.body[: reply.cut_at])
                if reply.stalls:
                    owner._ending.wait()
                if reply.cut_at is not None:
                    self.close_connection = True

            def setup(self) -> None:
                super().setup()
                owner._connections.append(self.connection)

            do_POST = do_GET  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False
        if context is not None:
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
            self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._server.shutdown()
        self._thread.join()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # a client may keep it for later
        self._server.server_close()


@contextmanager
def scripted(
    answer: Callable[[Seen], Reply], context: ssl.SSLContext | None = None
) -> Iterator[ScriptedServer]:
    """A running scripted server."""
    with ScriptedServer(answer, context) as server:
        yield server
