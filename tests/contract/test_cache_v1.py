"""What our server does besides keeping the protocol (conformance/): limits, damage, other users."""

import hashlib
import json
import os
import random
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cache_server import connection
from cache_server.app import Limits
from cache_server.library import Codec
from snapshotter.cache_v1.protocol import MAX_FETCH_CHUNKS, MAX_LIST_ENTRIES, MAX_READ_BYTES
from snapshotter.names import ContentName
from snapshotter.projection.image_reader import ImageReader
from tests.support.cache_v1 import Client, RunningServer, running_server
from tests.support.held_source import HeldSource
from tests.support.images import Image, Layer, directory, file, write_layout

SMALL = [b"%d" % number * 40 for number in range(50)]
BIG = bytes(range(256)) * 10_000
IMAGE = Image(
    [
        Layer([directory("d"), *(file(f"d/{at:02}", data) for at, data in enumerate(SMALL))]),
        Layer([directory("e"), file("e/big", BIG), file("e/empty")], compression="zstd"),
    ],
    env=["A=1", "A=2", "B=x=y"],
    entrypoint=["/run"],
    cmd=["arg"],
)


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = tmp_path_factory.mktemp("contract")
    write_layout(path / "oci", {"v1": IMAGE})
    with running_server(path, limits=Limits(idle_s=30)) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    with server.client() as connected:
        yield connected


@pytest.fixture(scope="module")
def prepared(server: RunningServer) -> dict[str, Any]:
    with server.client() as connected:
        answer = connected.ask(prepare_request(server))
    assert answer["status"] == "prepared", answer
    return answer


def prepare_request(server: RunningServer, **fields: Any) -> dict[str, Any]:
    image = f"oci:{server.path.parent}/oci:v1"
    return {"op": "prepare", "image": image, "architecture": "amd64", **fields}


def warm_companions(server: RunningServer) -> None:
    """Waits until the neighbourhoods asked for so far are built."""
    server.server._companions._thread.submit(lambda: None).result(30)


class TestOperations:
    def test_prepared_says_what_manifest_and_config_do(self, prepared: dict[str, Any]) -> None:
        assert prepared["digest"] == IMAGE.digest
        assert prepared["architecture"] == "amd64"
        assert prepared["env"] == {"A": "2", "B": "x=y"}
        assert (prepared["entrypoint"], prepared["cmd"]) == (["/run"], ["arg"])
        assert prepared["config"].encode() == IMAGE.config
        assert prepared["totals"] == {"files": 52, "bytes": sum(map(len, SMALL)) + len(BIG)}
        layers = prepared["layers"]
        assert [layer["diff_id"] for layer in layers] == [x.diff_id for x in IMAGE.layers]
        assert [layer["size"] for layer in layers] == [len(x.blob) for x in IMAGE.layers]
        assert layers[0]["chain_id"] == layers[0]["diff_id"]
        both = f"{layers[0]['chain_id']} {layers[1]['diff_id']}"
        assert layers[1]["chain_id"] == digest_of(both.encode())

    def test_everything_in_the_metadata_image_can_be_fetched(
        self, client: Client, prepared: dict[str, Any]
    ) -> None:
        image = prepared["metadata_image"]
        reader = ImageReader(client.content(image["content"], image["size"]))
        files = {
            path: client.content("sha256:" + name.content_id.hex(), name.size)
            for path, inode in reader.walk()
            if (name := reader.content(inode.nid)) is not None
        }
        expected = {f"d/{at:02}".encode(): data for at, data in enumerate(SMALL)}
        assert files == {**expected, b"e/big": BIG}

    def test_corrupt_chunk_fails_alone_and_is_never_served(self, tmp_path: Path) -> None:
        write_layout(tmp_path / "oci", {"v1": IMAGE})
        with running_server(tmp_path) as own, own.client() as client:
            prepared = client.ask(prepare_request(own))
            digest = hashlib.sha256(SMALL[7]).digest()
            location = own.library.locate(digest)
            with (tmp_path / "root" / "packs" / location.source.path).open("r+b") as pack:
                pack.seek(location.offset + location.length - 1)
                last = pack.read(1)[0]
                pack.seek(location.offset + location.length - 1)
                pack.write(bytes([last ^ 1]))
            asked = [digest_of(SMALL[6]), digest_of(SMALL[7]), digest_of(SMALL[8])]
            before, corrupt, after = client.fetch(asked)
            read = {"op": "read", "digest": prepared["image_handle"], "offset": 0, "length": 99}
            by_path = [client.ask({**read, "path": [*b"d/%02d" % at]}) for at in (6, 7)]
        assert (corrupt[0]["code"], corrupt[0]["chunk"]) == ("corrupt", asked[1])
        assert (before[1], after[1]) == (SMALL[6], SMALL[8])
        assert (by_path[0]["status"], by_path[1]["code"]) == ("data", "corrupt")

    def test_paths_of_an_image_without_metadata_image_make_it(self, tmp_path: Path) -> None:
        write_layout(tmp_path / "oci", {"v1": IMAGE})
        with running_server(tmp_path) as own, own.client() as client:
            bare = client.ask(prepare_request(own, merge=False))
            request = {"op": "stat", "digest": bare["image_handle"], "path": [*b"e/big"]}
            assert client.ask(request)["size"] == len(BIG)

    def test_a_large_chunk_comes_from_its_pack_or_fails_alone(self, tmp_path: Path) -> None:
        noise = random.Random(1).randbytes(3 << 20)
        write_layout(tmp_path / "oci", {"v1": Image([Layer([file("noise", noise)])])})
        chunks = [noise[at : at + (1 << 20)] for at in range(0, len(noise), 1 << 20)]
        asked = [digest_of(chunk) for chunk in chunks]
        with running_server(tmp_path) as own, own.client() as client:
            client.ask(prepare_request(own))
            assert [body for _, body in client.fetch(asked)] == chunks
            location = own.library.locate(hashlib.sha256(chunks[2]).digest())
            assert location.codec == Codec.RAW
            pack = tmp_path / "root" / "packs" / location.source.path
            os.truncate(pack, location.offset + location.length - 1)
            first, second, cut = client.fetch(asked)
            assert [first[1], second[1]] == chunks[:2]
            assert (cut[0]["code"], cut[0]["chunk"]) == ("corrupt", asked[2])
            assert client.ask({"op": "ping"})["status"] == "ready"

    def test_many_large_chunks_in_one_fetch(self, client: Client, prepared: dict[str, Any]) -> None:
        assert prepared
        chunks = [digest_of(BIG[: 1 << 20]), digest_of(BIG[1 << 20 : 2 << 20])] * 16
        answers = client.fetch(chunks)
        assert [fields["chunk"] for fields, _ in answers] == chunks
        assert all(digest_of(body) == fields["chunk"] for fields, body in answers)

    def test_companions_are_neighbours_each_once(
        self, server: RunningServer, client: Client, prepared: dict[str, Any]
    ) -> None:
        warm_companions(server)
        asked = digest_of(SMALL[20])
        options = {"handle": prepared["image_handle"], "companions_bytes": 10 * 80}
        answers = client.fetch([asked], **options)
        assert answers[0][0]["chunk"] == asked
        companions = answers[1:]
        assert [body for _, body in companions] == [
            SMALL[at] for at in (21, 19, 22, 18, 23, 17, 24, 16, 25, 15)
        ]
        for fields, body in companions:
            assert fields["companion"]
            assert ContentName.parse_path(fields["object"]) == ContentName(
                hashlib.sha256(body).digest(), len(body)
            )
        again = {body for _, body in client.fetch([asked], **options)[1:]}
        assert again
        assert again.isdisjoint(body for _, body in companions)

    def test_counters_tell_what_was_fetched(self, server: RunningServer) -> None:
        before = server.server.counters.snapshot()
        with server.client() as client:
            client.fetch([digest_of(SMALL[0])])
            counters = client.ask({"op": "ping"})["counters"]
        assert counters["fetches"] == before.get("fetches", 0) + 1
        assert counters["chunk_bytes"] == before.get("chunk_bytes", 0) + len(SMALL[0])


class TestPrepare:
    def test_client_that_leaves_cancels_only_its_waiting(self, tmp_path: Path) -> None:
        source = HeldSource(Image([Layer([file("f", bytes(600_000))], compression="none")]))
        request = {"op": "prepare", "image": "localhost/x", "architecture": "amd64"}
        with running_server(tmp_path, open_source=lambda reference, authfile: source) as server:
            with server.client() as leaver:
                leaver.send({**request, "progress": True})
                server.on_loop(source.reached.wait())
                fields = leaver.receive()[0]
                while fields["phase"] != "download":
                    fields = leaver.receive()[0]
                assert fields["total_bytes"] == len(source.image.layers[0].blob)
            with server.client() as stayer:
                stayer.send(request)
                server.loop.call_soon_threadsafe(source.release.set)
                assert stayer.receive()[0]["status"] == "prepared"
        assert len(source.opened) == 1

    def test_server_that_ends_leaves_no_download_behind(self, tmp_path: Path) -> None:
        source = HeldSource(Image([Layer([file("f", bytes(600_000))], compression="none")]))
        with running_server(tmp_path, open_source=lambda reference, authfile: source) as server:
            client = server.client()
            client.send({"op": "prepare", "image": "localhost/x", "architecture": "amd64"})
            server.on_loop(source.reached.wait())
        with client, pytest.raises(EOFError):
            client.receive()


class TestAccess:
    def test_socket_is_private(self, server: RunningServer) -> None:
        assert stat.S_IMODE(server.path.stat().st_mode) == 0o600
        assert [p.name for p in server.path.parent.iterdir() if p.name.startswith(".")] == []

    def test_other_users_are_refused(self, server: RunningServer) -> None:
        mode = server.path.stat().st_mode
        parents = [server.path.parent, *server.path.parent.parents][:-2]
        opened = [(path, path.stat().st_mode) for path in parents]
        server.path.chmod(0o666)
        for path, old in opened:
            path.chmod(old | 0o755)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.setgroups([])
            os.setresuid(65534, 65534, 65534)
            try:
                with Client(server.path) as client:
                    os.write(writer, json.dumps(client.receive()[0]).encode())
            finally:
                os._exit(0)
        os.close(writer)
        os.waitpid(child, 0)
        answer = json.loads(os.read(reader, 4096))
        os.close(reader)
        server.path.chmod(mode)
        for path, old in opened:
            path.chmod(old)
        assert answer["code"] == "permission_denied"


class TestLimits:
    def test_documented_limits_are_those_that_hold(self) -> None:
        limits = Limits()
        assert (limits.connections, limits.read_workers, limits.idle_s) == (64, 16, 5.0)
        assert (limits.prepare_workers, limits.prepare_queue) == (2, 16)
        assert connection._PROGRESS_INTERVAL_S >= 1 / 5
        assert connection._HEARTBEAT_S + connection._PROGRESS_INTERVAL_S <= 10
        assert MAX_FETCH_CHUNKS == MAX_LIST_ENTRIES == 256
        assert MAX_READ_BYTES == 1 << 20

    def test_progress_is_told_again_when_nothing_happens(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(connection, "_HEARTBEAT_S", 0)
        source = HeldSource(Image([Layer([file("f", bytes(600_000))], compression="none")]))
        request = {"op": "prepare", "image": "localhost/x", "architecture": "amd64"}
        with (
            running_server(tmp_path, open_source=lambda reference, authfile: source) as server,
            server.client() as client,
        ):
            client.send({**request, "progress": True})
            server.on_loop(source.reached.wait())
            told = [client.receive()[0] for _ in range(5)]
            assert told[-1] == told[-2]
            server.loop.call_soon_threadsafe(source.release.set)
            while (last := client.receive()[0])["status"] == "progress":
                pass
        assert last["status"] == "prepared"

    def test_prepare_beyond_the_queue_is_busy_and_the_connection_stays(
        self, tmp_path: Path
    ) -> None:
        source = HeldSource(Image([Layer([file("f", bytes(600_000))], compression="none")]))
        limits = Limits(prepare_workers=1, prepare_queue=0)
        with (
            running_server(
                tmp_path, open_source=lambda reference, authfile: source, limits=limits
            ) as server,
            server.client() as first,
            server.client() as second,
        ):
            request = {"op": "prepare", "image": "localhost/x", "architecture": "amd64"}
            first.send(request)
            server.on_loop(source.reached.wait())
            assert second.ask({**request, "image": "localhost/y"})["code"] == "busy"
            assert second.ask({"op": "ping"})["status"] == "ready"
            server.loop.call_soon_threadsafe(source.release.set)
            assert first.receive()[0]["status"] == "prepared"

    def test_reads_beyond_the_workers_wait_and_pings_do_not(self, tmp_path: Path) -> None:
        with (
            running_server(tmp_path, limits=Limits(read_workers=1)) as server,
            server.client() as reading,
            server.client() as other,
        ):
            server.server._service.reads.acquire()
            reading.send({"op": "fetch", "chunks": []})
            assert other.ask({"op": "ping"})["status"] == "ready"
            assert not reading.has_answer()
            server.server._service.reads.release()
            assert reading.receive()[0]["status"] == "done"

    def test_idle_connection_is_closed_between_requests(self, tmp_path: Path) -> None:
        with (
            running_server(tmp_path, limits=Limits(idle_s=0.05)) as server,
            server.client() as client,
        ):
            assert client.ask({"op": "ping"})["status"] == "ready"
            assert client.is_closed()

    def test_connection_beyond_the_limit_is_busy(self, tmp_path: Path) -> None:
        with running_server(tmp_path, limits=Limits(connections=2)) as server:
            held = [server.client(), server.client()]
            assert all(client.ask({"op": "ping"})["status"] == "ready" for client in held)
            with server.client() as third:
                assert third.receive()[0]["code"] == "busy"
                assert third.is_closed()
            for client in held:
                client.__exit__()
