import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import trio

from snapshotter.errors import BusyError
from snapshotter.framing import FrameDecoder, encode_frame
from snapshotter.service import control
from snapshotter.service.control_client import ControlClient
from snapshotter.service.control_server import Handler, Reply, serve_control
from snapshotter.service.frame_stream import FrameStream, connect
from tests.support.fake_daemon import make_image, make_record


def serve(tmp_path: Path, handler: Handler, client: Callable[[Path], Awaitable[None]]) -> None:
    """Runs ``client`` against a server with ``handler``; neither may hang."""
    path = tmp_path / "control.sock"

    async def main() -> None:
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                await nursery.start(serve_control, path, handler)
                await client(path)
                nursery.cancel_scope.cancel()

    trio.run(main)


async def ask(stream: FrameStream, request: object) -> control.Response:
    raw = request if isinstance(request, bytes) else msgspec.json.encode(request)
    await stream.send(raw)
    payload = await stream.receive()
    assert payload is not None
    return msgspec.json.decode(payload, type=control.Response)  # type: ignore[arg-type]


async def done(request: control.Request, reply: Reply) -> None:
    await reply.send(control.Done())


def test_requests_of_a_connection_are_answered_in_order(tmp_path: Path) -> None:
    async def images(request: control.Request, reply: Reply) -> None:
        assert isinstance(request, control.Pull)
        await reply.send(control.Progress(phase="index"))
        await reply.send(control.Failed(code="busy", message=request.image))

    async def client(path: Path) -> None:
        with await connect(path) as stream:
            for name in ("a", "b"):
                assert isinstance(await ask(stream, control.Pull(image=name)), control.Progress)
                failed = msgspec.json.decode(await stream.receive() or b"", type=control.Failed)
                assert failed.message == name

    serve(tmp_path, images, client)


def test_socket_is_for_this_user_alone(tmp_path: Path) -> None:
    async def client(path: Path) -> None:
        assert (await trio.Path(path).stat()).st_mode & 0o777 == 0o600

    serve(tmp_path, done, client)


@pytest.mark.parametrize(
    "raw", [b"{", b'{"op":"fly"}', b'{"op":"pull"}', b'{"op":"stop","now":true}', b"\xff"]
)
def test_bad_request_is_told_and_the_connection_stays(tmp_path: Path, raw: bytes) -> None:
    async def client(path: Path) -> None:
        with await connect(path) as stream:
            failed = await ask(stream, raw)
            assert isinstance(failed, control.Failed)
            assert failed.code == "invalid_request"
            assert isinstance(await ask(stream, control.Status()), control.Done)

    serve(tmp_path, done, client)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [(BusyError("mount x: in use"), "busy", "in use"), (OSError("disk"), "request_failed", "disk")],
)
def test_errors_of_a_handler_are_told(
    tmp_path: Path, error: Exception, code: str, words: str
) -> None:
    async def fail(request: control.Request, reply: Reply) -> None:
        raise error

    async def client(path: Path) -> None:
        with await connect(path) as stream:
            failed = await ask(stream, control.Status())
            assert isinstance(failed, control.Failed)
            assert (failed.code, words in failed.message) == (code, True)

    serve(tmp_path, fail, client)


def test_bad_length_ends_that_connection_alone(tmp_path: Path) -> None:
    async def client(path: Path) -> None:
        with await connect(path) as stream:
            raw = socket.socket(fileno=os.dup(stream._socket.fileno()))
            with raw:
                raw.sendall(b"\0\0\0\0")
            assert await stream.receive() is None
        with await connect(path) as stream:
            assert isinstance(await ask(stream, control.Status()), control.Done)

    serve(tmp_path, done, client)


def test_descriptor_comes_with_the_answer(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")

    async def hand_over(request: control.Request, reply: Reply) -> None:
        with (tmp_path / "file").open() as file:
            await reply.send(control.Done(), descriptor=file.fileno())

    async def client(path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as plain:
            await trio.to_thread.run_sync(plain.connect, str(path))
            plain.sendall(encode_frame(msgspec.json.encode(control.Status())))
            data, descriptors, _, _ = await trio.to_thread.run_sync(socket.recv_fds, plain, 1000, 1)
        decoder = FrameDecoder()
        decoder.feed(data)
        assert decoder.next_frame() == b'{"status":"done"}'
        assert os.read(descriptors[0], 100) == b"content"
        os.close(descriptors[0])

    serve(tmp_path, hand_over, client)


def test_answers_longer_than_a_frame_come_whole_with_their_descriptor(tmp_path: Path) -> None:
    """5000 images with a config of 2 KiB each, and a mount of a large image."""
    images = [make_image(image_handle=str(number), config="c" * 2048) for number in range(5000)]
    large = make_image(config='"' * (600 << 10))
    mounted = control.Mounted(mount=make_record(), image=large, reason="")
    answers = {control.ListImages: control.Images(images=images), control.Mount: mounted}

    async def answer(request: control.Request, reply: Reply) -> None:
        if isinstance(request, control.Mount):
            with (tmp_path / "file").open("w+") as file:
                await reply.send(control.Progress(phase="merge"))
                await reply.send(mounted, descriptor=file.fileno())
        else:
            await reply.send(answers.get(type(request), control.Done()))

    def ask_all(path: Path) -> None:
        with ControlClient(path) as client:
            assert client.ask(control.ListImages(), control.Images).images == images
            found, view = client.mount(control.Mount(image="x"))
            os.close(view)
            assert found == mounted
            client.ask(control.Refresh(), control.Done)

    async def client(path: Path) -> None:
        await trio.to_thread.run_sync(ask_all, path)

    serve(tmp_path, answer, client)


def test_work_for_an_asker_that_left_is_cancelled(tmp_path: Path) -> None:
    began, cancelled = trio.Event(), trio.Event()

    async def wait(request: control.Request, reply: Reply) -> None:
        began.set()
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()

    async def client(path: Path) -> None:
        with await connect(path) as stream:
            await stream.send(msgspec.json.encode(control.Status()))
            await began.wait()
        await cancelled.wait()

    serve(tmp_path, wait, client)
