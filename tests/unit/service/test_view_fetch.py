import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from snapshotter.errors import CorruptError, InvalidInputError, UnavailableError
from snapshotter.framing import FrameDecoder, encode_frame
from snapshotter.names import ContentName
from snapshotter.service import store_control, view_fetch
from snapshotter.service.view_fetch import ViewFetch
from snapshotter.vfs import Pending

NAME = ContentName(b"\x12" * 32, 77)


class SmallStore:
    """Says one of ``answers`` to each request, and hangs up where there is None."""

    def __init__(self, path: Path, answers: list[bytes | None]) -> None:
        self.heard: list[dict[str, object]] = []
        self._answers = answers
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while self._answers:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self._talk(connection)

    def _talk(self, connection: socket.socket) -> None:
        frames = FrameDecoder()
        while self._answers:
            while (frame := frames.next_frame()) is None:
                data = connection.recv(4096)
                if not data:
                    return
                frames.feed(data)
            self.heard.append(msgspec.json.decode(frame))
            answer = self._answers.pop(0)
            if answer is None:
                return
            connection.sendall(encode_frame(answer))

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(20)


DONE = msgspec.json.encode(store_control.Done())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.sock"


@pytest.fixture
def fetch(path: Path) -> Iterator[ViewFetch]:
    made = ViewFetch(path, image=3, deadline_s=20)
    yield made
    made.close()


def test_a_range_is_asked_for(path: Path, fetch: ViewFetch) -> None:
    store = SmallStore(path, [DONE, DONE])
    fetch.fetch(NAME, 5, 6)
    fetch.fetch(NAME, 0, 77)
    store.close()
    assert store.heard[0] == {
        "op": "ensure", "name": NAME.path, "image": 3, "offset": 5, "length": 6
    }  # fmt: skip
    assert len(store.heard) == 2


def test_the_end_of_a_fetch_is_told(path: Path, fetch: ViewFetch) -> None:
    failed = msgspec.json.encode(store_control.Failed(code="corrupt", message="chunk 3"))
    store = SmallStore(path, [DONE, failed])
    told: list[Exception | None] = []
    is_told = threading.Semaphore(0)

    def done(error: Exception | None) -> None:
        told.append(error)
        is_told.release()

    for _ in range(2):
        fetch(Pending(NAME, 0, 77), done)
        assert is_told.acquire(timeout=20)
    store.close()
    assert told[0] is None
    assert isinstance(told[1], CorruptError)


def test_a_store_that_died_is_waited_for(path: Path, fetch: ViewFetch) -> None:
    store = SmallStore(path, [None, DONE])
    fetch.fetch(NAME, 0, 77)
    store.close()
    assert len(store.heard) == 2


def test_no_store_is_an_error_in_the_end(fetch: ViewFetch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_fetch, "_PATIENCE_S", 0.0)
    with pytest.raises(UnavailableError, match="no answer from the store"):
        fetch.fetch(NAME, 0, 77)


def test_nonsense_is_an_error(path: Path, fetch: ViewFetch) -> None:
    store = SmallStore(path, [b"{}"])
    with pytest.raises(InvalidInputError, match="answer of the store"):
        fetch.fetch(NAME, 0, 77)
    store.close()
