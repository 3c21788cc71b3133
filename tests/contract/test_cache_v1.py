"""The server keeps docs/protocol/cache-v1.md: frames, order of checks, operations, limits."""

import hashlib
import json
import os
import random
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cache_server.app import Limits
from cache_server.library import Codec
from snapshotter.framing import encode_frame
from snapshotter.names import ContentName
from snapshotter.projection.image_reader import ImageReader
from snapshotter.store import chunk_table
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


class TestFrames:
    @pytest.mark.parametrize("length", [0, (1 << 20) + 1, 0xFFFFFFFF])
    def test_bad_length_is_told_and_closes(self, client: Client, length: int) -> None:
        client.send_raw(struct.pack(">I", length))
        assert client.receive()[0]["code"] == "invalid_request"
        assert client.is_closed()

    @pytest.mark.parametrize(
        "payload",
        [
            b"{",
            b"\xff\xfe",
            b"[]",
            b'{"version":2}',
            b'{"version":2,"token":null,"request":{"op":"ping"},"more":1}',
        ],
    )
    def test_bad_json_is_told_and_closes(self, client: Client, payload: bytes) -> None:
        client.send_raw(encode_frame(payload))
        assert client.receive()[0]["code"] == "invalid_request"
        assert client.is_closed()

    def test_frame_may_come_byte_by_byte(self, client: Client) -> None:
        envelope = b'{"version":2,"token":null,"request":{"op":"ping"}}'
        for byte in encode_frame(envelope):
            client.send_raw(bytes([byte]))
        assert client.receive()[0]["status"] == "ready"

    def test_requests_may_be_sent_ahead(self, client: Client) -> None:
        for _ in range(20):
            client.send({"op": "ping"})
        assert [client.receive()[0]["status"] for _ in range(20)] == ["ready"] * 20

    def test_version_1_closes_after_one_exchange(self, client: Client) -> None:
        assert client.ask({"op": "ping"}, version=1)["status"] == "ready"
        assert client.is_closed()

    @pytest.mark.parametrize("version", [0, 3])
    def test_other_versions_are_told_before_op_is_looked_at(
        self, client: Client, version: int
    ) -> None:
        assert client.ask({"op": "nonsense"}, version=version)["code"] == "unsupported_version"

    @pytest.mark.parametrize(
        "request_",
        [
            {"op": "nonsense"},
            {},
            {"op": "ping", "more": 1},
            {"op": "fetch"},
            {"op": "fetch", "chunks": [1]},
            {"op": "fetch", "chunks": ["sha256:AB"]},
            {"op": "fetch", "chunks": [digest_of(b"")] * 257},
            {"op": "fetch", "chunks": [], "companions_bytes": -1},
            {"op": "chunk_table", "content": digest_of(b""), "size": 1 << 20},
            {"op": "chunk_table", "content": "sha256:0", "size": 1 << 21},
            {"op": "open", "architecture": "amd64"},
            {"op": "open", "architecture": "amd64", "handle": "a", "chain": "b"},
            {"op": "open", "architecture": "AMD 64", "handle": "a"},
            {"op": "prepare", "image": "docker-daemon:x", "architecture": "amd64"},
            {"op": "prepare", "image": "a", "architecture": "amd64", "authfile": "relative"},
            {"op": "list", "digest": "sha256:0", "path": [], "offset": 0},
        ],
    )
    def test_bad_op_or_field_is_told_and_the_connection_stays(
        self, client: Client, request_: dict[str, Any]
    ) -> None:
        assert client.ask(request_)["code"] == "invalid_request"
        assert client.ask({"op": "ping"})["status"] == "ready"


class TestOperations:
    def test_ping_says_features(self, client: Client) -> None:
        assert client.ask({"op": "ping"})["features"] == ["objects", "progress"]

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
        reader = ImageReader(fetch_content(client, image["content"], image["size"]))
        files = {
            path: fetch_content(client, "sha256:" + name.content_id.hex(), name.size)
            for path, inode in reader.walk()
            if (name := reader.content(inode.nid)) is not None
        }
        expected = {f"d/{at:02}".encode(): data for at, data in enumerate(SMALL)}
        assert files == {**expected, b"e/big": BIG}

    def test_open_finds_by_handle_and_by_chain(
        self, client: Client, prepared: dict[str, Any]
    ) -> None:
        by_handle = {"op": "open", "handle": prepared["image_handle"], "architecture": "amd64"}
        assert client.ask(by_handle) == prepared
        unmerged = client.ask({**by_handle, "merge": False})
        assert "metadata_image" not in unmerged or unmerged["metadata_image"] is None
        lower = client.ask(
            {"op": "open", "chain": prepared["layers"][0]["chain_id"], "architecture": "amd64"}
        )
        assert lower["digest"] is None
        assert lower["config"] is None
        assert lower["totals"]["files"] == len(SMALL)
        assert lower["image_handle"] != prepared["image_handle"]
        again = {"op": "open", "handle": lower["image_handle"], "architecture": "amd64"}
        assert client.ask(again) == lower

    @pytest.mark.parametrize("key", ["handle", "chain"])
    def test_open_of_the_unknown_is_not_found(self, client: Client, key: str) -> None:
        request = {"op": "open", key: digest_of(b"unknown"), "architecture": "amd64"}
        assert client.ask(request)["code"] == "not_found"

    def test_open_for_another_architecture_is_not_found(
        self, client: Client, prepared: dict[str, Any]
    ) -> None:
        request = {"op": "open", "handle": prepared["image_handle"], "architecture": "arm64"}
        assert client.ask(request)["code"] == "not_found"

    def test_chunk_table_of_unknown_content_is_not_found(self, client: Client) -> None:
        request = {"op": "chunk_table", "content": digest_of(b"x"), "size": 1 << 21}
        assert client.ask(request)["code"] == "not_found"

    @pytest.mark.usefixtures("prepared")
    def test_missing_chunk_fails_alone_and_order_is_kept(self, client: Client) -> None:
        asked = [digest_of(SMALL[3]), digest_of(b"nowhere"), digest_of(SMALL[1])]
        first, missing, last = client.fetch(asked)
        assert first == ({"status": "data", "length": 40, "chunk": asked[0]}, SMALL[3])
        assert (missing[0]["code"], missing[0]["chunk"]) == ("not_found", asked[1])
        assert last[1] == SMALL[1]

    def test_corrupt_chunk_fails_alone_and_is_never_served(self, tmp_path: Path) -> None:
        write_layout(tmp_path / "oci", {"v1": IMAGE})
        with running_server(tmp_path) as own, own.client() as client:
            client.ask(prepare_request(own))
            digest = hashlib.sha256(SMALL[7]).digest()
            location = own.library.locate(digest)
            with (tmp_path / "root" / "packs" / location.source.path).open("r+b") as pack:
                pack.seek(location.offset + location.length - 1)
                last = pack.read(1)[0]
                pack.seek(location.offset + location.length - 1)
                pack.write(bytes([last ^ 1]))
            asked = [digest_of(SMALL[6]), digest_of(SMALL[7]), digest_of(SMALL[8])]
            before, corrupt, after = client.fetch(asked)
        assert (corrupt[0]["code"], corrupt[0]["chunk"]) == ("corrupt", asked[1])
        assert (before[1], after[1]) == (SMALL[6], SMALL[8])

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

    def test_empty_fetch_is_done(self, client: Client) -> None:
        assert client.fetch([]) == []

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

    def test_unknown_handle_gives_no_companions_and_no_error(self, client: Client) -> None:
        options = {"handle": "sha256:unknown", "companions_bytes": 1000}
        assert client.fetch([digest_of(b"nowhere")], **options)[0][0]["code"] == "not_found"
        assert client.fetch([], **options) == []

    def test_failed_prepare_names_the_image_and_leaves_the_connection(
        self, server: RunningServer, client: Client
    ) -> None:
        answer = client.ask(prepare_request(server, image=f"oci:{server.path.parent}/none:v1"))
        assert answer["code"] == "not_found"
        assert "/none" in answer["message"]
        assert client.ask({"op": "ping"})["status"] == "ready"

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
    def test_token_is_wanted_on_every_request_before_the_version(self, tmp_path: Path) -> None:
        with running_server(tmp_path, token="secret") as server:
            with server.client() as client:
                assert client.ask({"op": "ping"}, version=9)["code"] == "permission_denied"
                assert client.is_closed()
            with server.client() as client:
                assert client.ask({"op": "ping"}, token="secret")["status"] == "ready"
                assert client.ask({"op": "ping"}, token="wrong")["code"] == "permission_denied"

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


def fetch_content(client: Client, content: str, size: int) -> bytes:
    if size <= 1 << 20:
        return client.fetch([content])[0][1]
    client.send({"op": "chunk_table", "content": content, "size": size})
    fields, table = client.receive()
    assert fields["sha256"] == content
    name = ContentName(bytes.fromhex(content[7:]), size)
    chunks = ["sha256:" + digest.hex() for digest in chunk_table.decode(table, name)]
    return b"".join(body for _, body in client.fetch(chunks))
