"""What the daemon answers about chains, with a made-up cache server; nothing is mounted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio

from snapshotter.cache_v1.protocol import Layer, MetadataImage, Prepared
from snapshotter.digest import format_digest, sha256
from snapshotter.errors import InvalidInputError, NotFoundError, UnavailableError
from snapshotter.names import ContentName
from snapshotter.platforms import host_architecture
from snapshotter.service import control
from snapshotter.service.images import ImageCatalog
from snapshotter.service.lending import Lending, chain_name
from snapshotter.telemetry import Counters
from tests.support.trio_tests import trio_test

A, B, C = (format_digest(sha256(name)) for name in (b"a", b"b", b"c"))


def prepared(handle: str, *chains: str) -> Prepared:
    return Prepared(
        image_handle=handle,
        metadata_generation="1",
        digest=None,
        architecture=host_architecture(),
        env={},
        entrypoint=None,
        cmd=None,
        config=None,
        totals=None,
        layers=[
            Layer(digest=each, diff_id=each, chain_id=each, size=1, media_type="tar")
            for each in chains
        ],
        metadata_image=MetadataImage(format_digest(sha256(handle.encode())), 4096),
    )


class World:
    """A lending over a real catalog; the server knows the chains in ``opens``."""

    def __init__(self) -> None:
        self.opens: dict[str, Prepared] = {}
        self.prepares: dict[tuple[str, bool], Prepared] = {}
        self.asked: list[str] = []
        self.failure: Exception | None = None
        self.lent: list[tuple[str, int]] = []

    async def open(self, *, chain: str, architecture: str, merge: bool) -> Prepared:
        self.asked.append(f"open merge={merge}")
        if self.failure is not None:
            raise self.failure
        if chain not in self.opens:
            raise NotFoundError(f"chain {chain}")
        return self.opens[chain]

    async def prepare(
        self, image: str, *, architecture: str, refresh: bool, merge: bool, authfile: str | None
    ) -> Prepared:
        assert not merge
        self.asked.append(f"prepare refresh={refresh} authfile={authfile}")
        return self.prepares[image, refresh]

    async def ensure(self, name: ContentName) -> None:
        self.asked.append("ensure")

    async def wait(self) -> None:
        """For the processes behind it."""

    async def lend(self, mount_id: str, image: Any, *, read_only: bool) -> control.MountRecord:
        self.lent.append((mount_id, image.number))
        return control.MountRecord(
            id=mount_id, image="i", image_number=image.number, view="kernel", upper=None,
            private_upper=False, read_only=read_only, created_at_s=0, device=0, lent=True,
        )  # fmt: skip

    def lending(self, catalog: ImageCatalog) -> Lending:
        self.counters = Counters()
        everything: Any = SimpleNamespace(
            wait_for_cache_server=self.wait,
            wait_for_store=self.wait,
            choose_view=lambda _view: "",
            lend=self.lend,
            open=self.open,
            prepare=self.prepare,
            erofs_file=True,
            self_contained=False,
        )
        return Lending(catalog, everything, everything, everything, everything, self.counters)


async def over(tmp_path: Path, world: World, use: Any) -> None:
    async with trio.open_nursery() as nursery:
        server: Any = world
        catalog = ImageCatalog(tmp_path, server, world.ensure, nursery)
        await use(catalog, world.lending(catalog))


@trio_test
async def test_chain_that_the_server_has_is_not_merged_to_be_checked(tmp_path: Path) -> None:
    world = World()
    world.opens[A] = prepared("h", A)

    async def use(catalog: ImageCatalog, lending: Lending) -> None:
        await lending.check(control.CheckChain(chain=A, image="x:1"))
        assert world.asked == ["open merge=False"]
        assert catalog.all() == []
        assert world.counters.snapshot() == {"chains_checked": 1}

    await over(tmp_path, world, use)


@trio_test
async def test_image_is_prepared_and_asked_again_when_its_tag_moved(tmp_path: Path) -> None:
    world = World()
    world.prepares = {("x:1", False): prepared("old", A), ("x:1", True): prepared("new", B)}

    async def use(catalog: ImageCatalog, lending: Lending) -> None:
        await lending.check(control.CheckChain(chain=B, image="x:1", authfile="/auth"))
        assert world.asked[1:] == [
            "prepare refresh=False authfile=/auth",
            "prepare refresh=True authfile=/auth",
        ]
        with pytest.raises(NotFoundError, match="has no such layers"):
            await lending.check(control.CheckChain(chain=C, image="x:1"))

    await over(tmp_path, world, use)


@trio_test
async def test_manifest_that_is_named_by_digest_is_not_asked_for_twice(tmp_path: Path) -> None:
    world = World()
    image = f"docker://h/x@{C}"
    world.prepares = {(image, False): prepared("h", A)}

    async def use(catalog: ImageCatalog, lending: Lending) -> None:
        with pytest.raises(NotFoundError):
            await lending.check(control.CheckChain(chain=B, image=image))
        assert len(world.asked) == 2
        assert world.counters.snapshot() == {"chains_refused": 1}

    await over(tmp_path, world, use)


@trio_test
async def test_chain_of_an_unknown_image_is_not_found(tmp_path: Path) -> None:
    async def use(catalog: ImageCatalog, lending: Lending) -> None:
        with pytest.raises(NotFoundError):
            await lending.check(control.CheckChain(chain=A))
        with pytest.raises(InvalidInputError):
            await lending.check(control.CheckChain(chain="../a"))

    await over(tmp_path, World(), use)


@trio_test
async def test_layers_of_a_pulled_image_need_no_server(tmp_path: Path) -> None:
    world = World()
    world.failure = UnavailableError("nobody is there")

    async def use(catalog: ImageCatalog, lending: Lending) -> None:
        record = await catalog.add("docker://h/x:1", prepared("h", A, B))
        for chain in (A, B):
            await lending.check(control.CheckChain(chain=chain))
        lent = await lending.lend(control.Lend(chain=B, mount_id="0" * 12, read_only=False))
        assert lent.image == record
        assert world.lent == [("0" * 12, record.number)]
        with pytest.raises(UnavailableError):  # only its names are not here
            await lending.lend(control.Lend(chain=A, mount_id="1" * 12, read_only=False))

    await over(tmp_path, world, use)


@trio_test
async def test_merged_chain_is_recorded_and_needs_no_server_again(tmp_path: Path) -> None:
    world = World()
    world.opens[A] = prepared("chain", A)

    async def use(catalog: ImageCatalog, lending: Lending) -> None:
        request = control.Lend(chain=A, mount_id="0" * 12, read_only=True)
        first = await lending.lend(request)
        assert world.asked == ["open merge=True", "ensure"]
        assert first.image.references == [chain_name(A)]
        assert (first.erofs_file, first.self_contained) == (True, False)
        world.failure = UnavailableError("nobody is there")
        assert (await lending.lend(request)).image == first.image

    await over(tmp_path, world, use)


@trio_test
async def test_mount_id_that_would_name_a_path_is_refused(tmp_path: Path) -> None:
    async def use(catalog: ImageCatalog, lending: Lending) -> None:
        with pytest.raises(InvalidInputError, match="12 hex digits"):
            await lending.lend(control.Lend(chain=A, mount_id="../../etc", read_only=True))

    await over(tmp_path, World(), use)


def test_requests_travel() -> None:
    for request in (
        control.CheckChain(chain=A, image="x"),
        control.Lend(chain=A, mount_id="0" * 12, read_only=True),
    ):
        assert msgspec.json.decode(msgspec.json.encode(request), type=control.Request) == request
