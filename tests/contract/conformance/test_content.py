"""fetch, companions and chunk_table."""

from __future__ import annotations

import pytest

from snapshotter.projection.image_reader import ImageReader
from tests.contract.conformance.image_paths import (
    CHUNK,
    UNKNOWN,
    Fields,
    Tree,
    digest_of,
    sample,
    small,
)
from tests.support.cache_v1 import Client


class TestContent:
    def test_files_are_what_their_names_say(
        self, client: Client, reader: ImageReader, tree: Tree
    ) -> None:
        files = [path for path in sample(tree) if reader.content(tree[path].nid)]
        if not files:
            pytest.skip("the image has no content")
        for path in files:
            name = reader.content(tree[path].nid)
            assert name is not None
            data = client.content("sha256:" + name.content_id.hex(), name.size)
            assert len(data) == tree[path].size

    def test_chunks_come_in_order_and_a_missing_one_fails_alone(
        self, client: Client, reader: ImageReader, tree: Tree
    ) -> None:
        name = reader.content(tree[small(tree)].nid)
        assert name is not None
        known = "sha256:" + name.content_id.hex()
        first, missing, last = client.fetch([known, UNKNOWN, known])
        assert (missing[0]["code"], missing[0]["chunk"]) == ("not_found", UNKNOWN)
        assert digest_of(first[1]) == digest_of(last[1]) == known == first[0]["chunk"]

    def test_256_chunks_at_most(self, client: Client) -> None:
        answers = client.fetch([UNKNOWN] * 256)
        assert [fields["code"] for fields, _ in answers] == ["not_found"] * 256

    def test_empty_fetch_is_done(self, client: Client) -> None:
        assert client.fetch([]) == []

    def test_companions_are_whole_objects_within_their_budget_each_once(
        self, client: Client, reader: ImageReader, tree: Tree, prepared: Fields
    ) -> None:
        name = reader.content(tree[small(tree)].nid)
        assert name is not None
        options = {"handle": prepared["image_handle"], "companions_bytes": 10_000}
        seen = set()
        for _ in range(5):
            answers = client.fetch(["sha256:" + name.content_id.hex()], **options)[1:]
            assert sum(len(body) for _, body in answers) <= 10_000
            for fields, body in answers:
                assert fields["companion"]
                directory, _, rest = fields["object"].partition("/")
                assert digest_of(body) == "sha256:" + directory + rest.partition(".")[0]
                assert rest.partition(".")[2] == str(len(body))
                assert fields["object"] not in seen
                seen.add(fields["object"])

    def test_unknown_handle_gives_no_companions_and_no_error(self, client: Client) -> None:
        options = {"handle": "who", "companions_bytes": 1000}
        assert client.fetch([UNKNOWN], **options)[0][0]["code"] == "not_found"
        assert client.fetch([], **options) == []

    def test_unknown_chunk_table_is_not_found(self, client: Client) -> None:
        request = {"op": "chunk_table", "content": UNKNOWN, "size": 2 * CHUNK}
        assert client.ask(request)["code"] == "not_found"
