"""Frames, the order of checks, versions."""

from __future__ import annotations

import json
import struct

import pytest

from snapshotter.framing import MAX_FRAME_BYTES, encode_frame
from tests.contract.conformance.image_paths import CHUNK, UNKNOWN, Fields
from tests.support.cache_v1 import Client
from tests.support.cache_v1_target import Target


class TestFrames:
    @pytest.mark.parametrize("length", [0, MAX_FRAME_BYTES + 1, 0xFFFFFFFF])
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
            b"null",
            b'{"version":2}',
            b'{"version":2,"token":null,"request":{"op":"ping"},"more":1}',
            b'{"version":"2","token":null,"request":{"op":"ping"}}',
            b'{"version":2,"token":7,"request":{"op":"ping"}}',
            b'{"version":2,"token":null,"request":{"op":"ping"}}{}',
            b'{"version":2,"token":null,"request":{"op":"pi\xffng"}}',
            b'{"version":2,"token":null,"request":{"op":"ping"',
        ],
    )
    def test_bad_json_is_told_and_closes(self, client: Client, payload: bytes) -> None:
        client.send_raw(encode_frame(payload))
        assert client.receive()[0]["code"] == "invalid_request"
        assert client.is_closed()

    def test_largest_frame_is_read(self, target: Target, client: Client) -> None:
        envelope = {"version": 2, "token": target.token, "request": {"op": "ping"}}
        client.send_raw(encode_frame(json.dumps(envelope).encode().ljust(MAX_FRAME_BYTES)))
        assert client.receive()[0]["status"] == "ready"

    def test_frame_may_come_byte_by_byte(self, target: Target, client: Client) -> None:
        envelope = {"version": 2, "token": target.token, "request": {"op": "ping"}}
        for byte in encode_frame(json.dumps(envelope).encode()):
            client.send_raw(bytes([byte]))
        assert client.receive()[0]["status"] == "ready"

    def test_frame_that_ends_early_is_no_request(self, target: Target, client: Client) -> None:
        client.send_raw(struct.pack(">I", 100) + b"{")
        client.finish()
        assert client.is_closed()


class TestOrderOfChecks:
    """Length and JSON, token, version, op, fields: the first that is wrong is told."""

    def test_json_before_token(self, client: Client) -> None:
        client.send_raw(encode_frame(b'{"version":9,"token":"wrong","request":{'))
        assert client.receive()[0]["code"] == "invalid_request"

    @pytest.mark.parametrize("token", [None, "", "wrong"])
    def test_token_before_version(self, target: Target, client: Client, token: str | None) -> None:
        if target.token is None:
            pytest.skip("the server wants no token")
        answer = client.ask({"op": "nonsense"}, version=9, token=token)
        assert answer["code"] == "permission_denied"
        assert client.is_closed()

    def test_token_is_wanted_on_every_request(self, target: Target, client: Client) -> None:
        if target.token is None:
            pytest.skip("the server wants no token")
        assert client.ask({"op": "ping"})["status"] == "ready"
        assert client.ask({"op": "ping"}, token=None)["code"] == "permission_denied"

    @pytest.mark.parametrize("version", [0, 3, -1, 1 << 70])
    def test_version_before_op(self, client: Client, version: int) -> None:
        answer = client.ask({"op": "nonsense"}, version=version)
        assert answer["code"] == "unsupported_version"
        assert client.is_closed()

    @pytest.mark.parametrize(
        "request_",
        [
            {"op": "nonsense"},
            {},
            [],
            "ping",
            {"op": 1},
            {"op": "ping", "more": 1},
            {"op": "fetch"},
            {"op": "fetch", "chunks": [1]},
            {"op": "fetch", "chunks": ["sha256:AB"]},
            {"op": "fetch", "chunks": [UNKNOWN.upper()]},
            {"op": "fetch", "chunks": [UNKNOWN] * 257},
            {"op": "fetch", "chunks": [], "companions_bytes": -1},
            {"op": "chunk_table", "content": UNKNOWN, "size": CHUNK},
            {"op": "chunk_table", "content": UNKNOWN, "size": 1 << 63},
            {"op": "chunk_table", "content": "sha256:0", "size": 2 * CHUNK},
            {"op": "open", "architecture": "amd64"},
            {"op": "open", "architecture": "amd64", "handle": "a", "chain": "b"},
            {"op": "open", "architecture": "AMD 64", "handle": "a"},
            {"op": "prepare", "image": "docker-daemon:x", "architecture": "amd64"},
            {"op": "prepare", "image": "a", "architecture": "amd64", "authfile": "relative"},
            {"op": "prepare", "image": "a", "architecture": "amd64", "refresh": 1},
            {"op": "list", "digest": "latest", "path": [], "offset": 0},
            {"op": "list", "digest": UNKNOWN, "path": [], "offset": -1},
            {"op": "list", "digest": UNKNOWN, "path": []},
            {"op": "stat", "digest": UNKNOWN, "path": "etc"},
            {"op": "stat", "digest": UNKNOWN, "path": [256]},
            {"op": "stat", "digest": UNKNOWN, "path": [-1]},
            {"op": "read", "digest": UNKNOWN, "path": [97], "offset": 0, "length": 0},
            {"op": "read", "digest": UNKNOWN, "path": [97], "offset": 0, "length": CHUNK + 1},
            {"op": "read", "digest": UNKNOWN, "path": [97], "offset": -1, "length": 1},
        ],
    )
    def test_bad_op_or_field_is_told_and_the_connection_stays(
        self, client: Client, request_: Fields
    ) -> None:
        assert client.ask(request_)["code"] == "invalid_request"
        assert client.ask({"op": "ping"})["status"] == "ready"


class TestVersions:
    def test_version_2_has_any_number_of_exchanges_in_order(self, client: Client) -> None:
        for _ in range(20):
            client.send({"op": "ping"})
            client.send({"op": "nonsense"})
        told = [client.receive()[0]["status"] for _ in range(40)]
        assert told == ["ready", "error"] * 20

    def test_version_1_closes_after_any_one_exchange(
        self, target: Target, prepared: Fields
    ) -> None:
        of_image = {"digest": prepared["image_handle"], "path": []}
        requests = [
            ({"op": "ping"}, "ready"),
            (target.prepare(progress=True), "prepared"),
            ({"op": "list", **of_image, "offset": 0}, "entries"),
            ({"op": "stat", **of_image}, "metadata"),
            ({"op": "nonsense"}, "error"),
        ]
        for request, status in requests:
            with target.client(version=1) as once:
                assert once.ask(request)["status"] == status
                assert once.is_closed()
        with target.client(version=1) as once:
            answers = once.fetch([UNKNOWN, UNKNOWN])
            assert [fields["code"] for fields, _ in answers] == ["not_found"] * 2
            assert once.is_closed()

    def test_a_second_request_of_version_1_is_not_answered(self, target: Target) -> None:
        with target.client(version=1) as once:
            once.send_raw(once.frame({"op": "ping"}) * 2)
            assert once.receive()[0]["status"] == "ready"
            assert once.is_closed()
