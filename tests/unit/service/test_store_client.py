from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import trio

from snapshotter.errors import CorruptError, UnavailableError
from snapshotter.names import ContentName
from snapshotter.service import store_control
from snapshotter.service.frame_stream import FrameStream, listen
from snapshotter.service.store_client import StoreClient

NAME = ContentName(b"\x12" * 32, 77)


def talk(
    tmp_path: Path,
    answers: list[store_control.Response],
    use: Callable[[StoreClient], Awaitable[None]],
) -> list[bytes]:
    """Runs ``use`` against a store that says ``answers`` to each request and hangs up."""
    heard: list[bytes] = []
    path = tmp_path / "store.sock"

    async def main() -> None:
        with trio.fail_after(20), listen(path) as listener:
            async with trio.open_nursery() as nursery:

                async def serve() -> None:
                    while True:
                        connection, _ = await listener.accept()
                        with FrameStream(connection) as stream:
                            heard.append(await stream.receive() or b"")
                            for answer in answers:
                                await stream.send(msgspec.json.encode(answer))

                nursery.start_soon(serve)
                await use(StoreClient(path))
                nursery.cancel_scope.cancel()

    trio.run(main)
    return heard


def test_content_is_asked_for_by_name(tmp_path: Path) -> None:
    heard = talk(tmp_path, [store_control.Done()], lambda store: store.ensure(NAME, image=3))
    assert msgspec.json.decode(heard[0]) == {
        "op": "ensure",
        "name": NAME.path,
        "image": 3,
        "offset": 0,
        "length": None,
    }


def test_failure_is_the_error_that_the_store_had(tmp_path: Path) -> None:
    async def use(store: StoreClient) -> None:
        with pytest.raises(CorruptError, match="chunk 3"):
            await store.ensure(NAME)

    talk(tmp_path, [store_control.Failed(code="corrupt", message="chunk 3")], use)


def test_store_that_hangs_up_or_is_away_is_unavailable(tmp_path: Path) -> None:
    async def use(store: StoreClient) -> None:
        with pytest.raises(UnavailableError, match="before it answered"):
            await store.status()
        with pytest.raises(UnavailableError, match="nowhere"):
            await StoreClient(tmp_path / "nowhere").status()

    talk(tmp_path, [], use)


def test_events_come_until_the_store_goes(tmp_path: Path) -> None:
    said = [store_control.Resolvable(names=["a"]), store_control.Resolvable(names=["b"])]
    seen: list[str] = []

    async def use(store: StoreClient) -> None:
        async with store.subscribe() as events:
            async for event in events:
                seen.extend(event.names)

    talk(tmp_path, list(said), use)
    assert seen == ["a", "b"]
