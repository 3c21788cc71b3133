"""The registry that a Docker engine would run: our calls of testcontainers fit its classes.

No engine runs where these tests do, so the container is a stand-in with their signatures.
"""

import socket
import threading
from pathlib import Path
from unittest.mock import MagicMock, create_autospec

import pytest
from docker.models.containers import Container
from testcontainers.core.container import DockerContainer

from tests.support import registry


@pytest.fixture
def container(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    made = create_autospec(DockerContainer, instance=True)
    made.with_bind_ports.return_value = made
    made.get_wrapped_container.return_value = create_autospec(Container, instance=True)
    made.get_logs.return_value = (b'"GET /v2/ HTTP/1.1" 200\n', b"started\n")
    factory = create_autospec(DockerContainer, return_value=made)
    monkeypatch.setattr("testcontainers.core.container.DockerContainer", factory)
    monkeypatch.setattr(registry, "_engine_answers", lambda: True)
    monkeypatch.setattr(registry.Registry, "_answers", lambda _self: True)
    return made


def test_a_container_is_made_once_and_keeps_its_address(
    container: MagicMock, tmp_path: Path
) -> None:
    with registry.running_registry(tmp_path) as running:
        address = running.address
        assert running.requests("GET", "/v2/") == 1
        running.stop()
        running.start()
        assert running.address == address
    container.with_bind_ports.assert_called_once_with(5000, int(address.rpartition(":")[2]))
    container.start.assert_called_once_with()
    inner = container.get_wrapped_container.return_value
    inner.stop.assert_called_once_with(timeout=1)
    inner.start.assert_called_once_with()
    container.stop.assert_called_once_with()


def test_a_container_that_does_not_start_is_not_removed(
    container: MagicMock, tmp_path: Path
) -> None:
    container.start.side_effect = OSError("no image")
    with pytest.raises(OSError, match="no image"), registry.running_registry(tmp_path):
        pass
    container.stop.assert_not_called()


@pytest.mark.parametrize(("answer", "is_engine"), [(b"HTTP/1.0 200 OK\r\n", True), (b"no", False)])
def test_an_engine_is_what_answers_a_ping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes, is_engine: bool
) -> None:
    path = tmp_path / "docker.sock"
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    assert not registry._engine_answers()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        assert registry._engine_answers() is is_engine
        thread.join()
