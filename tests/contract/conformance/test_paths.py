"""list, stat and read."""

from __future__ import annotations

import stat
from typing import Any

import pytest

from snapshotter.projection.image_reader import ImageReader
from tests.contract.conformance.image_paths import (
    CHUNK,
    SAMPLED,
    UNKNOWN,
    Fields,
    Tree,
    digest_of,
    link,
    regular,
    sample,
)
from tests.support.cache_v1 import Client


class Browser:
    """Asks about paths of the image."""

    def __init__(self, client: Client, digest: str) -> None:
        self._client = client
        self._digest = digest

    def ask(self, op: str, path: bytes, **fields: Any) -> Fields:
        return self._client.ask({"op": op, "digest": self._digest, "path": [*path], **fields})

    def read(self, path: bytes, offset: int, length: int) -> bytes:
        """Bytes, compared with the digest that comes with them."""
        request = {"op": "read", "digest": self._digest, "path": [*path]}
        self._client.send({**request, "offset": offset, "length": length})
        fields, body = self._client.receive()
        assert fields["status"] == "data", fields
        assert (fields["length"], fields["sha256"]) == (len(body), digest_of(body))
        return body

    def pages(self, path: bytes) -> list[Fields]:
        pages: list[Fields] = []
        offset = 0
        while offset is not None:
            page = self.ask("list", path, offset=offset)
            assert page["status"] == "entries", page
            assert 0 < len(page["names"]) <= 256 or page["next_offset"] is None
            assert len(page["metadata"]) == len(page["names"])
            pages.append(page)
            offset = page["next_offset"]
        return pages


@pytest.fixture
def browser(client: Client, prepared: Fields) -> Browser:
    return Browser(client, prepared["image_handle"])


KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}
OPERATIONS = [("list", {"offset": 0}), ("stat", {}), ("read", {"offset": 0, "length": 1})]


class TestPaths:
    def test_stat_says_what_the_metadata_image_does(
        self, browser: Browser, reader: ImageReader, tree: Tree
    ) -> None:
        for path in sample(tree):
            inode = tree[path]
            is_link = stat.S_ISLNK(inode.mode)
            assert browser.ask("stat", path) == {
                "status": "metadata",
                "kind": KINDS.get(stat.S_IFMT(inode.mode), "special"),
                "size": inode.size,
                "mode": inode.mode,
                "uid": inode.uid,
                "gid": inode.gid,
                "inode": inode.nid,
                "nlink": inode.nlink,
                "mtime": inode.mtime_ns // 1_000_000_000,
                "mtime_nsec": inode.mtime_ns % 1_000_000_000,
                "target": [*reader.readlink(inode.nid)] if is_link else None,
            }

    def test_list_has_every_name_in_order_with_what_stat_says(
        self, browser: Browser, tree: Tree
    ) -> None:
        directories = [path for path, inode in tree.items() if inode.is_directory]
        for directory in directories[:SAMPLED]:
            prefix = directory + b"/" if directory else b""
            pages = browser.pages(directory)
            names = [bytes(name) for page in pages for name in page["names"]]
            below = {path.removeprefix(prefix) for path in tree if path.startswith(prefix)}
            assert names == sorted(name for name in below if name and b"/" not in name)
            metadata = [fields for page in pages for fields in page["metadata"]]
            for name, fields in list(zip(names, metadata, strict=True))[:: max(len(names) // 8, 1)]:
                assert fields == browser.ask("stat", prefix + name)

    def test_list_beyond_the_end_is_empty(self, browser: Browser) -> None:
        page = browser.ask("list", b"", offset=1 << 40)
        assert (page["names"], page["metadata"], page["next_offset"]) == ([], [], None)

    def test_read_gives_the_files_bytes(
        self, client: Client, browser: Browser, reader: ImageReader, tree: Tree
    ) -> None:
        for path in sample(tree):
            name = reader.content(tree[path].nid)
            if name is not None and name.size <= 8 * CHUNK:
                whole = client.content("sha256:" + name.content_id.hex(), name.size)
                parts = [browser.read(path, at, CHUNK) for at in range(0, name.size, CHUNK)]
                assert b"".join(parts) == whole

    def test_read_over_the_border_of_two_chunks(
        self, client: Client, browser: Browser, reader: ImageReader, tree: Tree
    ) -> None:
        path = regular(tree, CHUNK + 1)
        name = reader.content(tree[path].nid)
        assert name is not None
        whole = client.content("sha256:" + name.content_id.hex(), name.size)
        for offset, length in ((CHUNK - 3, 5), (CHUNK, 1), (CHUNK - 1, CHUNK), (1, CHUNK)):
            assert browser.read(path, offset, length) == whole[offset : offset + length]

    def test_read_is_short_at_the_end_and_empty_beyond(self, browser: Browser, tree: Tree) -> None:
        path = regular(tree, 1)
        size = tree[path].size
        assert len(browser.read(path, size - 1, 10)) == 1
        assert browser.read(path, size, 10) == b""
        assert browser.read(path, 1 << 40, CHUNK) == b""

    @pytest.mark.parametrize(("op", "fields"), OPERATIONS)
    def test_absent_names_are_not_found(
        self, browser: Browser, tree: Tree, op: str, fields: Fields
    ) -> None:
        for path in (b"not-there-at-all", b"not-there/at/all", regular(tree) + b"/below"):
            assert browser.ask(op, path, **fields)["code"] == "not_found"

    @pytest.mark.parametrize(("op", "fields"), OPERATIONS)
    def test_links_are_not_followed(
        self, browser: Browser, tree: Tree, op: str, fields: Fields
    ) -> None:
        path = link(tree)
        assert browser.ask(op, path + b"/x", **fields)["code"] == "not_found"
        answer = browser.ask(op, path, **fields)
        if op == "stat":
            assert answer["kind"] == "symlink"
        else:
            assert answer["code"] == "invalid_request"

    def test_what_cannot_be_listed_or_read(self, browser: Browser, tree: Tree) -> None:
        assert browser.ask("list", regular(tree), offset=0)["code"] == "invalid_request"
        assert browser.ask("read", b"", offset=0, length=1)["code"] == "invalid_request"

    @pytest.mark.parametrize(("op", "fields"), OPERATIONS)
    @pytest.mark.parametrize(
        "path",
        [
            *(b"/", b"/etc", b"a/", b"a//b", b".", b"..", b"a/./b", b"a/../b", b"a\0b"),
            *(b"x" * 256, b"a/" + b"x" * 256, b"a/" * 8192 + b"a"),
        ],
    )
    def test_bad_paths_are_refused(
        self, browser: Browser, op: str, fields: Fields, path: bytes
    ) -> None:
        assert browser.ask(op, path, **fields)["code"] == "invalid_request"

    def test_longest_paths_are_looked_up(self, browser: Browser) -> None:
        for path in (b"x" * 255, b"/".join([b"x" * 255] * 64)):
            assert browser.ask("stat", path)["code"] == "not_found"

    @pytest.mark.parametrize(("op", "fields"), OPERATIONS)
    def test_unknown_image_is_not_a_missing_name(
        self, client: Client, op: str, fields: Fields
    ) -> None:
        assert Browser(client, UNKNOWN).ask(op, b"a", **fields)["code"] == "request_failed"

    def test_manifests_digest_names_the_image_too(
        self, client: Client, browser: Browser, prepared: Fields
    ) -> None:
        older = Browser(client, prepared["digest"])
        assert older.ask("list", b"", offset=0) == browser.ask("list", b"", offset=0)
