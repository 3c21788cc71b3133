"""ping, prepare and open."""

from __future__ import annotations

import json
import stat

import pytest

from tests.contract.conformance.image_paths import UNKNOWN, Fields, Tree, digest_of
from tests.support.cache_v1 import Client
from tests.support.cache_v1_target import Target


class TestImages:
    def test_ping_says_features(self, client: Client) -> None:
        answer = client.ask({"op": "ping"})
        assert answer["status"] == "ready"
        assert {"objects", "progress"} <= set(answer["features"])

    def test_prepared_has_every_field(self, target: Target, prepared: Fields) -> None:
        assert isinstance(prepared["image_handle"], str)
        assert isinstance(prepared["metadata_generation"], str)
        assert prepared["architecture"] == target.architecture
        assert all(isinstance(value, str) for value in prepared["env"].values())
        assert isinstance(prepared["entrypoint"], list)
        assert isinstance(prepared["cmd"], list)
        config = json.loads(prepared["config"])
        assert [layer["diff_id"] for layer in prepared["layers"]] == config["rootfs"]["diff_ids"]
        assert set(prepared["layers"][0]) == {
            *("digest", "diff_id", "chain_id", "size", "media_type")
        }
        chain = ""
        for layer in prepared["layers"]:
            chain = digest_of(f"{chain} {layer['diff_id']}".encode()) if chain else layer["diff_id"]
            assert layer["chain_id"] == chain

    def test_totals_count_files_and_their_bytes_once(self, prepared: Fields, tree: Tree) -> None:
        files = {inode.nid: inode.size for inode in tree.values() if stat.S_ISREG(inode.mode)}
        assert prepared["totals"] == {"files": len(files), "bytes": sum(files.values())}

    def test_preparing_again_gives_the_same(
        self, target: Target, client: Client, prepared: Fields
    ) -> None:
        assert client.ask(target.prepare()) == prepared
        assert client.ask(target.prepare(progress=True)) == prepared

    def test_without_merge_there_is_no_metadata_image(
        self, target: Target, client: Client, prepared: Fields
    ) -> None:
        bare = client.ask(target.prepare(merge=False))
        assert bare["metadata_image"] is None
        assert bare["image_handle"] == prepared["image_handle"]

    def test_open_finds_by_handle_and_by_chain(
        self, target: Target, client: Client, prepared: Fields
    ) -> None:
        ask = {"op": "open", "architecture": target.architecture}
        assert client.ask({**ask, "handle": prepared["image_handle"]}) == prepared
        chain = prepared["layers"][0]["chain_id"]
        lower = client.ask({**ask, "chain": chain})
        assert (lower["digest"], lower["config"]) == (None, None)
        assert lower["layers"] == prepared["layers"][:1]
        assert lower["image_handle"] != prepared["image_handle"]
        assert client.ask({**ask, "handle": lower["image_handle"]}) == lower

    @pytest.mark.parametrize("key", ["handle", "chain"])
    def test_open_of_the_unknown_is_not_found(
        self, target: Target, client: Client, key: str
    ) -> None:
        request = {"op": "open", key: UNKNOWN, "architecture": target.architecture}
        assert client.ask(request)["code"] == "not_found"

    def test_open_for_another_architecture_is_not_found(
        self, client: Client, prepared: Fields
    ) -> None:
        request = {"op": "open", "handle": prepared["image_handle"], "architecture": "other"}
        assert client.ask(request)["code"] == "not_found"

    def test_failed_prepare_leaves_the_connection(self, target: Target, client: Client) -> None:
        answer = client.ask(target.prepare(image="oci:/nowhere/at/all:v1"))
        assert answer["code"] == "not_found"
        assert "/nowhere/at/all" in answer["message"]
        assert client.ask({"op": "ping"})["status"] == "ready"
