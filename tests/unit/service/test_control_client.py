import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotter.errors import BusyError, UnavailableError
from snapshotter.framing import encode_frame
from snapshotter.service import control
from snapshotter.service.control_client import ControlClient
from tests.support.fake_daemon import FakeDaemon, make_image, make_record


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path / "control.sock") as running:
        yield running


@pytest.fixture
def client(daemon: FakeDaemon, tmp_path: Path) -> Iterator[ControlClient]:
    with ControlClient(tmp_path / "control.sock") as connected:
        yield connected


def test_requests_are_answered_in_order(daemon: FakeDaemon, client: ControlClient) -> None:
    daemon.answers[control.ListImages] = control.Images(images=[make_image()])
    daemon.answers[control.ListMounts] = control.Mounts(mounts=[make_record()])
    assert client.ask(control.ListImages(), control.Images).images == [make_image()]
    assert client.ask(control.ListMounts(), control.Mounts).mounts == [make_record()]
    assert daemon.requests == [control.ListImages(), control.ListMounts()]


def test_connection_lives_until_the_daemon_ends_it(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        with ControlClient(tmp_path / "s") as client:
            daemon, _ = listener.accept()
            assert client.is_alive()
            daemon.close()
            assert not client.is_alive()


def test_progress_is_told_before_the_answer(daemon: FakeDaemon, client: ControlClient) -> None:
    steps = [control.Progress(phase="resolve"), control.Progress(phase="merge", done_bytes=3)]
    daemon.answers[control.Pull] = [*steps, control.Image(image=make_image())]
    seen: list[control.Progress] = []
    client.ask(control.Pull(image="x"), control.Image, on_progress=seen.append)
    assert seen == steps


def test_a_failure_is_the_error_of_its_code(daemon: FakeDaemon, client: ControlClient) -> None:
    daemon.answers[control.Stop] = control.Failed(code="busy", message="in use")
    with pytest.raises(BusyError, match="in use"):
        client.ask(control.Stop(), control.Done)


def test_an_answer_to_another_question_is_refused(
    daemon: FakeDaemon, client: ControlClient
) -> None:
    daemon.answers[control.Status] = control.Done()
    with pytest.raises(UnavailableError, match="answered 'done'"):
        client.ask(control.Status(), control.Running)


def test_a_mount_comes_with_its_descriptor(daemon: FakeDaemon, client: ControlClient) -> None:
    inside, outside = os.pipe()
    daemon.view = lambda: inside
    daemon.answers[control.Mount] = control.Mounted(
        mount=make_record(), image=make_image(), reason="r"
    )
    mounted, view = client.mount(control.Mount(image="x"))
    os.write(outside, b"!")
    assert (mounted.reason, os.read(view, 1)) == ("r", b"!")
    assert not os.get_inheritable(view)
    os.close(view)
    os.close(outside)


def test_a_mount_without_its_descriptor_is_refused(
    daemon: FakeDaemon, client: ControlClient
) -> None:
    daemon.answers[control.Mount] = control.Mounted(
        mount=make_record(), image=make_image(), reason=""
    )
    with pytest.raises(UnavailableError, match="without its mount"):
        client.mount(control.Mount(image="x"))


def test_nobody_there_says_how_to_start_it(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="snapshotter daemon start"):
        ControlClient(tmp_path / "none.sock")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\0\0",
        b"\0\0\0\0",
        b"\0\0\0\2{}",
        b"\xff\xff\xff\xff",
        encode_frame(b"\xff"),
        encode_frame(b'{"status":"images","x":' + b"[" * 5000),
        encode_frame(b'{"status":"long","length_bytes":3}') + b"{}",
        encode_frame(b'{"status":"long","length_bytes":-1}') + b"{}",
        encode_frame(b'{"status":"long","length_bytes":0}') + b"{}",
    ],
)
def test_a_daemon_that_talks_nonsense_is_unavailable(tmp_path: Path, answer: bytes) -> None:
    path = tmp_path / "odd.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        with ControlClient(path) as client:
            peer, _ = listener.accept()
            peer.sendall(answer)
            peer.shutdown(socket.SHUT_WR)
            with peer, pytest.raises(UnavailableError, match=r"odd\.sock"):
                client.ask(control.Status(), control.Running)
