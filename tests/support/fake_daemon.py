"""A daemon that answers the control socket from a table, and makes real views of the host's tree.

For tests of the client, the command line and sandboxes: what they send is recorded.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from snapshotter.cache_v1.protocol import MetadataImage, Prepared, Totals
from snapshotter.framing import FrameDecoder, encode_frame
from snapshotter.kernel_view import syscalls
from snapshotter.service import control
from snapshotter.store.images import ImageRecord

Answer = control.Response | list[control.Response]
_requests = msgspec.json.Decoder(control.Request)


def make_image(**prepared: object) -> ImageRecord:
    """An image record; keywords replace fields of its ``prepared``."""
    fields: dict[str, object] = {
        "image_handle": "h" * 16,
        "metadata_generation": "1",
        "digest": "sha256:" + "ab" * 32,
        "architecture": "amd64",
        "env": {},
        "entrypoint": None,
        "cmd": ["/bin/true"],
        "config": None,
        "totals": Totals(files=12, bytes=3 << 20),
        "layers": [],
        "metadata_image": MetadataImage(content="sha256:" + "cd" * 32, size=8192),
    }
    return ImageRecord(
        number=1,
        references=["docker.io/library/demo:1"],
        pulled_at_s=1_700_000_000.0,
        prepared=Prepared(**(fields | prepared)),  # type: ignore[arg-type]
    )


def make_record(**fields: object) -> control.MountRecord:
    """A mount record; keywords replace its fields."""
    values: dict[str, object] = {
        "id": "0123456789ab",
        "image": "docker.io/library/demo:1",
        "image_number": 1,
        "view": "kernel",
        "upper": None,
        "private_upper": True,
        "read_only": False,
        "created_at_s": 1_700_000_000.0,
        "device": 0,
    }
    return control.MountRecord(**(values | fields))  # type: ignore[arg-type]


class FakeDaemon:
    """Listens on a socket until closed. ``answers`` maps a request's type to what it gets."""

    def __init__(self, path: Path) -> None:
        self.requests: list[control.Request] = []
        self.answers: dict[type, Answer | Callable[[msgspec.Struct], Answer]] = {
            control.Placed: control.Done(),
            control.Unmounted: control.Done(),
        }
        self.view: Callable[[], int] | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._listener.bind(str(path))
        self._listener.listen()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> "FakeDaemon":
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)

    def await_clients_gone(self) -> None:
        """Waits until every connection that was made is closed on both sides."""
        for thread in self._threads[1:]:
            thread.join(10)

    def asked(self, kind: type) -> list[msgspec.Struct]:
        """The requests of one type that came, in order."""
        return [request for request in self.requests if isinstance(request, kind)]

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        frames = FrameDecoder()
        with connection, contextlib.suppress(ConnectionError):  # a client may be killed
            while data := connection.recv(65536):
                frames.feed(data)
                while payload := frames.next_frame():
                    request = _requests.decode(payload)
                    self.requests.append(request)
                    for response in self._answers(request):
                        self._send(connection, response)

    def _answers(self, request: msgspec.Struct) -> list[control.Response]:
        answer = self.answers.get(type(request))
        if answer is None:
            return [control.Failed(code="request_failed", message=f"no answer to {request}")]
        answer = answer(request) if callable(answer) else answer
        return answer if isinstance(answer, list) else [answer]

    def _send(self, connection: socket.socket, response: control.Response) -> None:
        frame = encode_frame(msgspec.json.encode(response))
        if isinstance(response, control.Mounted) and self.view is not None:
            view = self.view()
            try:
                socket.send_fds(connection, [frame], [view])
            finally:
                os.close(view)
        else:
            connection.sendall(frame)


def view_of_host(upper: Path) -> Callable[[], int]:
    """Makes detached overlay mounts of the host's own root with its upper in ``upper``.

    ``upper`` must be on another file system (a tmpfs): overlayfs refuses an upper within a lower.
    """

    def make() -> int:
        (upper / "upper").mkdir(exist_ok=True)
        (upper / "work").mkdir(exist_ok=True)
        options = [
            ("lowerdir", "/"),
            ("upperdir", str(upper / "upper")),
            ("workdir", str(upper / "work")),
        ]
        return syscalls.make_mount("overlay", options)

    return make
