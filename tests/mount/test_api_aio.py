"""The asynchronous half under both event loops, over real sandboxes with a fake daemon."""

import asyncio
import os
import signal
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import pytest

from snapshotter.api import aio
from snapshotter.errors import CommandFailedError, CommandTimeoutError, NotFoundError, SandboxError
from snapshotter.service import control
from tests.support.api_daemon import daemon, upper
from tests.support.fake_daemon import Answer, FakeDaemon, make_record
from tests.support.mounts import mounts_below

pytestmark = pytest.mark.mount

__all__ = ["daemon", "upper"]

HELD = ["sh", "-c", "trap '' TERM INT; (setsid sleep 1000 &); echo up; exec sleep 1000"]

Body = Callable[[aio.Client, aio.Sandbox], Awaitable[None]]
Play = Callable[[Body], None]


@pytest.fixture(autouse=True)
def own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


@pytest.fixture(params=["asyncio", "trio"])
def loop(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def play(loop: str, daemon: FakeDaemon, upper: Path, tmp_path: Path) -> Play:
    """Plays a body with a client and a sandbox, and looks whether anything is left."""

    async def main(body: Body) -> None:
        with anyio.fail_after(60):
            async with aio.connect(root=tmp_path) as client, client.sandbox("i") as box:
                await body(client, box)

    def run(body: Body) -> None:
        anyio.run(main, body, backend=loop)
        assert len(daemon.asked(control.Mount)) == len(daemon.asked(control.Unmounted))
        assert mounts_below(upper)[1:] == []

    return run


def exists(path: str) -> bool:
    return os.path.exists(path)


def test_commands_and_files(play: Play, tmp_path: Path) -> None:
    async def body(client: aio.Client, box: aio.Sandbox) -> None:
        done = await box.run(["sh", "-c", "cat; exit 3"], input=b"in")
        assert (done.stdout, done.exit_status) == (b"in", 3)
        assert (await box.run(["echo", "x"], text=True)).stdout == "x\n"
        await box.write_file("/d/f", b"data")
        assert await box.read_file("/d/f") == b"data"
        await box.copy_out("/d", tmp_path / "out")
        await box.copy_in(tmp_path / "out", "/back")
        assert (await box.run(["cat", "/back/f"])).stdout == b"data"
        assert box.record.id == make_record().id
        assert box.image.number == 1

    play(body)


def test_failures_are_those_of_the_synchronous_half(play: Play) -> None:
    async def body(client: aio.Client, box: aio.Sandbox) -> None:
        with pytest.raises(SandboxError, match="not found"):
            await box.run(["nothing-here"])
        with pytest.raises(CommandFailedError):
            await box.run(["false"], check=True)
        with pytest.raises(CommandTimeoutError):
            await box.run(HELD, timeout=0.3)
        with pytest.raises(NotFoundError):
            await box.read_file("/none")
        with pytest.raises(SandboxError, match="nobody"):
            async with box.start(["true"], user="nobody-here"):
                pass
        async with box.start(["nothing-here"]) as process:
            with pytest.raises(SandboxError, match="not found"):
                await process.wait()

    play(body)


def test_output_is_streamed_and_input_fed(play: Play) -> None:
    async def body(client: aio.Client, box: aio.Sandbox) -> None:
        async with box.start(["cat"], stdin="pipe") as process:
            assert process.stdin is not None
            assert process.stdout is not None
            await process.stdin.send(b"one\n")
            assert await process.stdout.receive() == b"one\n"
            data = os.urandom(1 << 20)
            async with anyio.create_task_group() as group:
                group.start_soon(feed, process.stdin, data)
                assert b"".join([chunk async for chunk in process.stdout]) == data
            assert await process.wait() == 0
        with pytest.raises(anyio.ClosedResourceError):
            await process.stdout.receive()

    async def feed(stream: anyio.abc.ByteSendStream, data: bytes) -> None:
        async with stream:
            await stream.send(data)

    play(body)


def test_a_process_can_be_signalled_and_killed(play: Play) -> None:
    async def body(client: aio.Client, box: aio.Sandbox) -> None:
        script = "trap 'exit 5' USR1; echo up; while :; do sleep 0.01; done"
        async with box.start(["sh", "-c", script]) as process:
            assert process.stdout is not None
            assert await process.stdout.receive() == b"up\n"
            process.send_signal(signal.SIGUSR1)
            assert await process.wait() == 5
        async with box.start(HELD) as process:
            await process.kill()
            assert await process.wait() == 137

    play(body)


@asynccontextmanager
async def held(box: aio.Sandbox) -> AsyncIterator[int]:
    """A command that goes on; its pid on the host."""
    async with box.start(["sh", "-c", "echo up; exec sleep 1000"]) as process:
        assert process.stdout is not None
        assert await process.stdout.receive() == b"up\n"
        yield process.pid


def test_a_cancelled_command_is_ended_with_all_it_started(play: Play) -> None:
    async def body(client: aio.Client, box: aio.Sandbox) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(box.run, ["sh", "-c", "(setsid sleep 1000 &); sleep 1000 > /up"])
            while await missing(box):
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        with anyio.CancelScope() as scope:
            async with held(box) as pid:
                scope.cancel()
                await anyio.sleep_forever()
        assert not exists(f"/proc/{pid}")
        assert (await box.run(["true"])).exit_status == 0

    async def missing(box: aio.Sandbox) -> bool:
        try:
            await box.read_file("/up")
        except NotFoundError:
            return True
        return False

    play(body)


def test_many_sandboxes_and_commands_at_once(play: Play) -> None:
    said: list[str] = []

    async def body(client: aio.Client, box: aio.Sandbox) -> None:
        async with AsyncExitStack() as stack, anyio.create_task_group() as group:
            boxes = [await stack.enter_async_context(client.sandbox("i")) for _ in range(5)]
            for number, each in enumerate(boxes * 2):
                group.start_soon(run, each, number)

    async def run(box: aio.Sandbox, number: int) -> None:
        said.append((await box.run(["echo", f"{number}"], text=True)).stdout)

    play(body)
    assert sorted(said) == [f"{number}\n" for number in range(10)]


def test_a_mount_goes_with_its_block_even_when_it_is_cancelled(play: Play) -> None:
    async def body(client: aio.Client, box: aio.Sandbox) -> None:
        async with client.mount("i") as tree:
            assert exists(f"{tree.path}/etc/passwd")
        assert not exists(tree.path)
        with anyio.CancelScope() as scope:
            async with client.mount("i") as tree:
                scope.cancel()
                async with await anyio.open_file(f"{tree.path}/etc/passwd"):
                    await anyio.sleep_forever()
        assert not exists(tree.path)

    play(body)


@pytest.mark.parametrize("what", ["sandbox", "mount"])
def test_a_cancelled_request_leaves_nothing(
    what: str, loop: str, daemon: FakeDaemon, upper: Path, tmp_path: Path
) -> None:
    """The daemon answers after its asker has gone, which must not wait for it."""
    asked, gone = threading.Event(), threading.Event()
    make = daemon.answers[control.Mount]
    assert callable(make)

    def answer_late(request: msgspec.Struct) -> Answer:
        asked.set()
        gone.wait(60)
        return make(request)

    async def main() -> None:
        async with aio.connect(root=tmp_path) as client, anyio.create_task_group() as group:
            group.start_soon(use, client)
            await anyio.to_thread.run_sync(asked.wait)
            group.cancel_scope.cancel()

    async def use(client: aio.Client) -> None:
        async with client.sandbox("i") if what == "sandbox" else client.mount("i"):
            raise AssertionError

    daemon.answers[control.Mount] = answer_late
    anyio.run(main, backend=loop)
    gone.set()
    assert list(Path(tempfile.gettempdir()).iterdir()) == []
    assert mounts_below(upper)[1:] == []


def test_asyncio_s_own_cancellation_ends_a_command_and_a_sandbox(
    daemon: FakeDaemon, upper: Path, tmp_path: Path
) -> None:
    async def work(on_up: Callable[[], object]) -> None:
        async with (
            aio.connect(root=tmp_path) as client,
            client.sandbox("i") as box,
            box.start(HELD) as process,
        ):
            assert process.stdout is not None
            await process.stdout.receive()
            on_up()
            await box.run(["sleep", "1000"])

    async def main() -> None:
        up = asyncio.Event()
        task = asyncio.create_task(work(up.set))
        await up.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(None) as limit:
                await work(lambda: limit.reschedule(0))

    asyncio.run(main())
    assert len(daemon.asked(control.Unmounted)) == 2
    assert mounts_below(upper)[1:] == []
