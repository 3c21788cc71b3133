import os
import stat
import sys
import threading
from pathlib import Path

import pytest

from snapshotter.errors import AccessDeniedError, UnavailableError
from snapshotter.paths import Paths
from snapshotter.service import control
from snapshotter.service.daemon_process import connect_or_start, daemon_command, wait_for_end

LISTENER = """
import os, socket, sys
from snapshotter.framing import encode_frame
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
with open(sys.argv[1] + ".pids", "a") as pids:
    pids.write(f"{os.getpid()}\\n")
connections = []
while True:
    connection, _ = listener.accept()
    connections.append(connection)
    if connection.recv(65536):
        connection.sendall(encode_frame(b'{"status":"done"}'))
        break
"""


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(tmp_path, tmp_path / "run")


def listener(paths: Paths) -> tuple[str, ...]:
    return (sys.executable, "-c", LISTENER, str(paths.control_socket))


def test_a_daemon_is_started_once_however_many_ask(paths: Paths) -> None:
    errors: list[BaseException] = []

    def connect() -> None:
        try:
            connect_or_start(paths, command=listener(paths)).close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=connect) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    with connect_or_start(paths, command=("/bin/false",)) as client:
        client.ask(control.Stop(), control.Done)
    pids = Path(f"{paths.control_socket}.pids").read_text().split()
    assert (errors, len(pids)) == ([], 1)
    os.waitpid(int(pids[0]), 0)
    assert wait_for_end(int(pids[0]))
    assert stat.S_IMODE(paths.run.stat().st_mode) == 0o700


def test_a_daemon_that_ends_at_once_is_told_with_its_last_words(paths: Paths) -> None:
    paths.run.mkdir()
    paths.log("daemon").write_text("words of an earlier life\n")
    command = ("/bin/sh", "-c", "echo the gate is missing >&2; exit 3")
    with pytest.raises(UnavailableError) as caught:
        connect_or_start(paths, command=command)
    assert "status 3" in str(caught.value)
    assert "the gate is missing" in str(caught.value)
    assert "earlier" not in str(caught.value)


def test_a_run_directory_that_is_a_link_is_refused(paths: Paths, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    paths.run.symlink_to("elsewhere")
    with pytest.raises(AccessDeniedError, match="not a directory of this user"):
        connect_or_start(paths, command=("/bin/false",))


def test_the_command_line_names_every_path(paths: Paths, tmp_path: Path) -> None:
    command = daemon_command(paths, tmp_path / "c.toml")
    assert command[0] == sys.executable
    assert command[-6:] == (
        *("--root", str(paths.root)),
        *("--run", str(paths.run)),
        *("--config", str(tmp_path / "c.toml")),
    )


def test_a_process_that_lives_on_is_waited_for_no_longer_than_asked() -> None:
    assert not wait_for_end(os.getpid(), timeout_s=0)
