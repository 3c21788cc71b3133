import socket
import stat
from pathlib import Path

import pytest

from cache_server.listening import listen_on
from snapshotter.errors import BusyError, InvalidInputError


def test_socket_is_private_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "run" / "cache.sock"
    listener = listen_on(path)
    with listener.socket:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert list(path.parent.iterdir()) == [path]
        listener.unlink()
        assert list(path.parent.iterdir()) == []


def test_living_server_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "cache.sock"
    with listen_on(path).socket:
        inode = path.stat().st_ino
        with pytest.raises(BusyError, match="answers"):
            listen_on(path)
        assert path.stat().st_ino == inode


def test_dead_socket_is_replaced_and_its_maker_leaves_the_new_one_alone(tmp_path: Path) -> None:
    path = tmp_path / "cache.sock"
    dead = listen_on(path)
    dead.socket.close()
    with listen_on(path).socket, socket.socket(socket.AF_UNIX) as client:
        dead.unlink()
        client.connect(str(path))


def test_other_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "cache.sock"
    path.write_text("precious")
    with pytest.raises(InvalidInputError, match="not a socket"):
        listen_on(path)
    assert path.read_text() == "precious"


def test_path_that_clients_could_not_connect_to_is_refused(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 100) / "cache.sock"
    with pytest.raises(InvalidInputError, match="107 bytes"):
        listen_on(path)
    assert not path.parent.exists()


def test_directory_may_be_as_deep_as_a_socket_path_allows(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path = tmp_path / ("x" * (107 - len(str(path)) - 1)) / "s"
    with listen_on(path).socket:
        assert path.is_socket()
