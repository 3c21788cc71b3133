import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cache_server.library import BlobDescriptor
from cache_server.sources.credentials import Credentials, Keyring
from cache_server.sources.manifest import ResolvedImage
from cache_server.sources.network import Network, NetworkSettings
from cache_server.sources.reference import RegistryReference, parse_reference
from cache_server.sources.registry import RegistrySource
from snapshotter.errors import (
    AccessDeniedError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    SnapshotterError,
    UnavailableError,
)
from tests.support.http_faults import Reply, Seen, scripted
from tests.support.images import INDEX, MANIFEST, Image, Layer, file, push, write_layout
from tests.support.registry import Registry

LAYER = Layer([file("a", b"x" * 100_000)], compression="none")
IMAGE = Image([LAYER], cmd=["run"])


PASSWORD = Credentials("u", "p", "/known.json (it)")


class KnownKeyring(Keyring):
    """Has the same credentials for every registry; counts how often it was asked."""

    def __init__(self, credentials: Credentials | None = None) -> None:
        super().__init__(usual=["/known.json"])
        self.credentials = credentials
        self.asked = 0

    async def find(self, reference: RegistryReference) -> Credentials | None:
        self.asked += 1
        return self.credentials


@asynccontextmanager
async def source_of(
    text: str, credentials: Credentials | None = None, **settings: Any
) -> AsyncIterator[RegistrySource]:
    reference = parse_reference(text)
    assert isinstance(reference, RegistryReference)
    network = Network(NetworkSettings(**settings), environ={})
    try:
        yield RegistrySource(reference, network, keyring=KnownKeyring(credentials), backoff_s=0.0)
    finally:
        await network.aclose()


def resolve(text: str, architecture: str = "amd64", **options: Any) -> ResolvedImage:
    async def run() -> ResolvedImage:
        async with source_of(text, **options) as source:
            return await source.resolve(architecture)

    return asyncio.run(run())


def download(text: str, descriptor: BlobDescriptor, **options: Any) -> bytes:
    async def run() -> bytes:
        async with source_of(text, **options) as source, source.open_blob(descriptor) as pieces:
            return b"".join([piece async for piece in pieces])

    return asyncio.run(run())


def serve_image(request: Seen) -> Reply:
    """What a faultless registry answers for IMAGE."""
    if "/manifests/" in request.path:
        return Reply(body=IMAGE.manifest, headers={"Content-Type": MANIFEST})
    if request.path.endswith(LAYER.descriptor["digest"]):
        return Reply(body=LAYER.blob)
    return Reply(body=IMAGE.config)


LAYER_BLOB = BlobDescriptor(LAYER.descriptor["digest"], len(LAYER.blob), "")


def test_resolves_what_the_manifest_says() -> None:
    with scripted(serve_image) as server:
        image = resolve(f"{server.address}/a:v1")
    assert image.digest == IMAGE.digest
    assert image.config == IMAGE.config
    assert [layer.diff_id for layer in image.layers] == [LAYER.diff_id]
    assert MANIFEST in server.seen[0].headers["Accept"]
    assert INDEX in server.seen[0].headers["Accept"]


@pytest.mark.parametrize(
    ("status", "kind", "requests"),
    [
        (403, AccessDeniedError, 1),
        (404, NotFoundError, 1),
        (418, UnavailableError, 1),
        (429, UnavailableError, 4),
        (503, UnavailableError, 4),
    ],
)
def test_status_decides_error_and_retries(
    status: int, kind: type[SnapshotterError], requests: int
) -> None:
    with scripted(lambda _: Reply(status)) as server, pytest.raises(kind, match="v9"):
        resolve(f"{server.address}/a:v9")
    assert len(server.seen) == requests


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (Reply(404), r"404.* is there 'team/a' with 'v9' at 127\.0\.0\.1:\d+\?"),
        (Reply(429), "429.*docker login"),
        (Reply(429, headers={"Retry-After": "7200"}), "try again in 7200 s"),
        (Reply(400), r"400.*TLS.*/etc/docker/certs\.d/127\.0\.0\.1:\d+/ca\.crt"),
    ],
)
def test_refusals_say_what_to_do(reply: Reply, said: str) -> None:
    with scripted(lambda _: reply) as server, pytest.raises(SnapshotterError, match=said):
        resolve(f"{server.address}/team/a:v9")


def test_passing_failure_is_survived() -> None:
    broken = Reply(body=IMAGE.manifest, cut_at=3)
    failures = iter([Reply(429, headers={"Retry-After": "0"}), Reply(502), broken])

    def answer(request: Seen) -> Reply:
        return next(failures, None) or serve_image(request)

    with scripted(answer) as server:
        assert resolve(f"{server.address}/a:v1").digest == IMAGE.digest


def test_nobody_there_is_unavailable() -> None:
    with scripted(serve_image) as server:
        address = server.address
    with pytest.raises(UnavailableError, match="failed 4 times"):
        resolve(f"{address}/a:v1")


def test_redirect_to_another_origin_does_not_carry_the_token() -> None:
    with scripted(serve_image) as storage:

        def answer(request: Seen) -> Reply:
            if request.path.startswith("/token"):
                return Reply(body=b'{"token":"secret"}')
            if "Authorization" not in request.headers:
                realm = f'Bearer realm="http://{server.address}/token"'
                return Reply(401, headers={"WWW-Authenticate": realm})
            return Reply(307, headers={"Location": f"http://{storage.address}{request.path}"})

        with scripted(answer) as server:
            assert download(f"{server.address}/a:v1", LAYER_BLOB) == LAYER.blob
    assert storage.seen
    assert all("Authorization" not in seen.headers for seen in storage.seen)


def test_redirect_to_plain_http_elsewhere_is_refused_unsent() -> None:
    def answer(_: Seen) -> Reply:
        return Reply(307, headers={"Location": "http://192.0.2.1/blob"})

    with scripted(answer) as server, pytest.raises(AccessDeniedError, match="plain HTTP"):
        download(f"{server.address}/a:v1", LAYER_BLOB)


def test_redirect_loop_ends() -> None:
    def answer(request: Seen) -> Reply:
        return Reply(307, headers={"Location": request.path})

    with scripted(answer) as server, pytest.raises(UnavailableError, match="redirect"):
        download(f"{server.address}/a:v1", LAYER_BLOB)


def test_stalled_download_goes_on_where_it_stopped() -> None:
    def answer(request: Seen) -> Reply:
        if "Range" in request.headers:
            start = int(request.headers["Range"][6:-1])
            return Reply(206, LAYER.blob[start:])
        return Reply(body=LAYER.blob, cut_at=70_000, stalls=True)

    with scripted(answer) as server:
        blob = download(f"{server.address}/a:v1", LAYER_BLOB, stall_timeout_s=0.2)
        assert blob == LAYER.blob
        assert [seen.headers.get("Range") for seen in server.seen] == [None, "bytes=70000-"]


def test_answer_with_another_range_than_asked_for_is_not_used() -> None:
    def answer(request: Seen) -> Reply:
        if "Range" not in request.headers:
            return Reply(body=LAYER.blob, cut_at=70_000)
        size = len(LAYER.blob)
        wrong = {"Content-Range": f"bytes 0-{size - 1}/{size}"}
        return Reply(206, LAYER.blob, headers=wrong)

    with (
        scripted(answer) as server,
        pytest.raises(UnavailableError, match="asked for bytes from 70000, it sent those from 0"),
    ):
        download(f"{server.address}/a:v1", LAYER_BLOB)


def test_download_that_hardly_advances_ends() -> None:
    def answer(request: Seen) -> Reply:
        start = int(request.headers.get("Range", "bytes=0-")[6:-1])
        return Reply(206 if start else 200, LAYER.blob[start:], cut_at=1)

    with scripted(answer) as server, pytest.raises(UnavailableError, match="failed 4 times"):
        download(f"{server.address}/a:v1", LAYER_BLOB)
    assert len(server.seen) == 4


@pytest.mark.parametrize("honours_range", [True, False])
def test_broken_download_goes_on_where_it_stopped(honours_range: bool) -> None:
    def answer(request: Seen) -> Reply:
        start = int(request.headers.get("Range", "bytes=0-")[6:-1])
        if not honours_range:
            # broken twice; a registry that ignores ranges begins anew each time
            cut = 40_000 * len(server.seen)
            return Reply(body=LAYER.blob, cut_at=cut if cut < len(LAYER.blob) else None)
        body = LAYER.blob[start:]
        return Reply(206 if start else 200, body, cut_at=40_000 if len(body) > 40_000 else None)

    with scripted(answer) as server:
        assert download(f"{server.address}/a:v1", LAYER_BLOB) == LAYER.blob
    assert len(server.seen) == 3


def test_download_that_never_advances_is_unavailable() -> None:
    def answer(_: Seen) -> Reply:
        return Reply(body=LAYER.blob, cut_at=0)

    with scripted(answer) as server, pytest.raises(UnavailableError, match="layer sha256"):
        download(f"{server.address}/a:v1", LAYER_BLOB)


def replaced(part: str, reply: Reply) -> Callable[[Seen], Reply]:
    return lambda request: reply if part in request.path else serve_image(request)


@pytest.mark.parametrize(
    ("part", "reply", "reference", "kind"),
    [
        ("/manifests/", Reply(body=b"{}"), "a@sha256:" + "0" * 64, CorruptError),
        (
            "/manifests/",
            Reply(body=IMAGE.manifest, headers={"Docker-Content-Digest": "sha256:" + "0" * 64}),
            "a:v1",
            CorruptError,
        ),
        ("/blobs/", Reply(body=IMAGE.config + b" "), "a:v1", CorruptError),
        ("/manifests/", Reply(body=b" " * ((4 << 20) + 1)), "a:v1", InvalidInputError),
        ("/blobs/", Reply(body=b" " * ((8 << 20) + 1)), "a:v1", InvalidInputError),
        ("/manifests/", Reply(body=b"<html>"), "a:v1", InvalidInputError),
        ("/manifests/", Reply(body=b"{}"), "a:v1", InvalidInputError),
        ("/manifests/", Reply(body=b'{"schemaVersion":1}'), "a:v1", SnapshotterError),
    ],
)
def test_wrong_manifests_and_configs_are_refused(
    part: str, reply: Reply, reference: str, kind: type[SnapshotterError]
) -> None:
    with scripted(replaced(part, reply)) as server, pytest.raises(kind):
        resolve(f"{server.address}/{reference}")


def test_index_manifest_with_wrong_digest_is_corrupt() -> None:
    index = {
        "schemaVersion": 2,
        "manifests": [
            {
                "mediaType": MANIFEST,
                "digest": "sha256:" + "0" * 64,
                "size": 9,
                "platform": {"os": "linux", "architecture": "amd64"},
            }
        ],
    }
    reply = Reply(body=json.dumps(index).encode())
    with scripted(replaced("/manifests/v1", reply)) as server, pytest.raises(CorruptError):
        resolve(f"{server.address}/a:v1")


@pytest.mark.real
def test_real_registry_index_by_platform_and_blob(registry: Registry, tmp_path: Path) -> None:
    other = Layer([file("b")])
    images = [IMAGE, Image([other], architecture="arm", variant="v7")]
    layout = write_layout(tmp_path, {"v1": images})
    push(layout, "v1", registry.address, "sources/index")
    text = f"docker://{registry.address}/sources/index:v1"
    assert resolve(text).digest == IMAGE.digest
    assert resolve(text, "arm/v7").digest == images[1].digest
    assert resolve(f"{text}@{IMAGE.digest}").digest == IMAGE.digest
    assert download(text, LAYER_BLOB) == LAYER.blob
    with pytest.raises(NotFoundError, match="linux/amd64, linux/arm/v7"):
        resolve(text, "riscv64")
    with pytest.raises(NotFoundError, match=r"v2.*404"):
        resolve(f"docker://{registry.address}/sources/index:v2")
