"""The order in which neighbours come, shared content, budgets, and that an index never lies."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_server.companions import (
    FIRST_WINDOW_BYTES,
    MAX_COMPANION_BYTES,
    Companions,
    Neighbourhood,
    Trail,
)
from cache_server.library import Library, StoredImage
from snapshotter.cache_v1.protocol import MetadataImage, Prepared
from snapshotter.digest import format_digest, sha256
from snapshotter.projection.image_reader import ImageReader
from snapshotter.projection.image_writer import write_image
from snapshotter.projection.tree import Inode, walk

HANDLE = "sha256:handle"


def tree(paths: dict[str, bytes]) -> Inode:
    """A tree of these files; a path that ends with a slash is an empty directory."""
    root = Inode(0o40755)
    for path, data in paths.items():
        *parents, name = path.encode().split(b"/")
        at = root
        for part in parents:
            assert at.children is not None
            at = at.children.setdefault(part, Inode(0o40755))
        if name:
            assert at.children is not None
            content = sha256(data) if data else b""
            at.children[name] = Inode(0o100644, size=len(data), content=content)
    return root


def neighbourhood(paths: dict[str, bytes]) -> Neighbourhood:
    return Neighbourhood(ImageReader(write_image(tree(paths))))


def prepared(image: MetadataImage | None) -> Prepared:
    return Prepared(
        image_handle=HANDLE,
        metadata_generation="1",
        digest=None,
        architecture="amd64",
        env={},
        entrypoint=None,
        cmd=None,
        config=None,
        totals=None,
        layers=[],
        metadata_image=image,
    )


def test_own_directory_then_below_then_siblings() -> None:
    names = ["a/1", "b/1", "b/2", "b/3", "b/c/1", "b/d/e/1", "b/f/", "g/1", "top"]
    found = neighbourhood({name: name.encode() for name in names})
    (start,) = found.positions(sha256(b"b/2"))
    near = [found.name(position).content_id for position in found.near(start)]
    expected = ["b/3", "b/1", "b/c/1", "b/d/e/1", "g/1", "top", "a/1"]
    assert near == [sha256(name.encode()) for name in expected]


def test_files_of_the_root_lead_below() -> None:
    found = neighbourhood({"x": b"x", "y": b"y", "d/1": b"1"})
    (start,) = found.positions(sha256(b"x"))
    near = [found.name(position).content_id for position in found.near(start)]
    assert near == [sha256(b"y"), sha256(b"1")]


def test_only_small_files_with_content_are_listed() -> None:
    largest = b"x" * MAX_COMPANION_BYTES
    found = neighbourhood({"a": largest, "b": largest + b"x", "c": b"", "d": b"d"})
    assert len(found) == 2
    assert found.positions(sha256(largest + b"x")) == []
    assert found.positions(bytes(32)) == []


@given(
    st.dictionaries(
        st.text("abc/", min_size=1, max_size=9).filter(
            lambda path: all(path.split("/")) and not path.startswith("/")
        ),
        st.binary(min_size=1, max_size=2),
        max_size=20,
    )
)
def test_every_file_is_found_where_it_is_and_nothing_else(paths: dict[str, bytes]) -> None:
    files = {
        path: data
        for path, data in paths.items()
        if not any(other.startswith(path + "/") for other in paths)
    }
    root = tree(files)
    found = Neighbourhood(ImageReader(write_image(root)))
    expected = sorted(inode.content for _, inode in walk(root) if inode.size)
    assert sorted(found.name(at).content_id for at in range(len(found))) == expected
    for content_id in expected:
        positions = found.positions(content_id)
        assert len(positions) == expected.count(content_id)
        for position in positions:
            near = list(found.near(position))
            assert len(set(near)) == len(near)
            assert position not in near
            assert set(near) <= set(range(len(found)))


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return Library(tmp_path / "root")


def built(library: Library, paths: dict[str, bytes]) -> Companions:
    """Companions that know one image."""
    name = library.add_content(write_image(tree(paths)))
    image = MetadataImage(format_digest(name.content_id), name.size)
    companions = Companions(library)
    companions.warm(prepared(image))
    companions._thread.submit(lambda: None).result(30)
    return companions


def test_budget_and_trail_bound_what_is_chosen(library: Library) -> None:
    with library:
        files = {f"d/{number}": bytes([number]) * 100 for number in range(10)}
        companions = built(library, files)
        trail = Trail()
        asked = [sha256(files["d/4"])]
        first = companions.choose(HANDLE, asked, 350, trail)
        assert [name.content_id for name in first] == [
            sha256(files[f"d/{number}"]) for number in (5, 3, 6)
        ]
        rest = companions.choose(HANDLE, asked, 10_000, trail)
        assert len(rest) == 6
        assert companions.choose(HANDLE, asked, 10_000, trail) == []
        assert companions.choose(HANDLE, asked, 0, Trail()) == []
        companions.close()


def test_what_was_asked_for_is_no_companion_later(library: Library) -> None:
    with library:
        companions = built(library, {"a": b"a", "b": b"b"})
        trail = Trail()
        companions.choose(HANDLE, [sha256(b"a")], 0, trail)
        assert companions.choose(HANDLE, [sha256(b"b")], 100, trail) == []
        companions.close()


def test_shared_content_is_taken_where_the_client_was_last(library: Library) -> None:
    with library:
        files = {f"{top}/{n}": f"{top}{n}".encode() for top in "ab" for n in range(3)}
        companions = built(library, {**files, "a/same": b"same", "b/same": b"same"})
        for top in "ab":
            trail = Trail()
            companions.choose(HANDLE, [sha256(f"{top}0".encode())], 1, trail)
            chosen = companions.choose(HANDLE, [sha256(b"same")], 4, trail)
            assert {name.content_id for name in chosen} <= {
                sha256(files[f"{top}/{n}"]) for n in range(3)
            }
            assert chosen
        companions.close()


def test_image_is_indexed_when_first_asked_for(library: Library) -> None:
    with library:
        name = library.add_content(write_image(tree({"a": b"a", "b": b"b"})))
        image = MetadataImage(format_digest(name.content_id), name.size)
        library.save_image(StoredImage(prepared=prepared(image)))
        companions = Companions(library)
        assert companions.choose(HANDLE, [sha256(b"a")], 100, Trail()) == []
        companions._thread.submit(lambda: None).result(30)
        assert len(companions.choose(HANDLE, [sha256(b"a")], 100, Trail())) == 1
        companions.close()


@pytest.mark.parametrize("image", [None, MetadataImage(format_digest(bytes(32)), 4096)])
def test_image_that_cannot_be_read_has_no_companions(
    library: Library, image: MetadataImage | None
) -> None:
    with library:
        library.save_image(StoredImage(prepared=prepared(image)))
        companions = Companions(library)
        for _ in range(2):
            assert companions.choose(HANDLE, [sha256(b"a")], 100, Trail()) == []
            companions._thread.submit(lambda: None).result(30)
        companions.close()


def test_reading_on_brings_more_each_time_and_a_jump_few_again(library: Library) -> None:
    with library:
        files = {f"d/{number:03}": b"%03d" % number * 1000 for number in range(200)}
        files["e/far"] = b"far"
        companions = built(
            library, {**files, **{f"f/{n:03}": b"%03dx" % n * 750 for n in range(50)}}
        )
        trail = Trail()
        position, brought = 0, []
        for _ in range(4):
            asked = [sha256(files[f"d/{position:03}"])]
            chosen = companions.choose(HANDLE, asked, 1 << 20, trail)
            brought.append(len(chosen))
            position += 1 + len(chosen)
        # the first ask is where a fresh trail stands, so it counts as reading on
        assert brought == [10, 21, 43, 87]
        jumped = companions.choose(HANDLE, [sha256(b"040x" * 750)], 1 << 20, trail)
        assert len(jumped) == FIRST_WINDOW_BYTES // 3000
        companions.close()


def test_client_that_overtakes_its_companions_gets_more(library: Library) -> None:
    with library:
        files = {f"d/{number:03}": b"%03d" % number * 1000 for number in range(200)}
        companions = built(library, files)
        trail = Trail()
        first = companions.choose(HANDLE, [sha256(files["d/100"])], 1 << 20, trail)
        second = companions.choose(HANDLE, [first[-1].content_id], 1 << 20, trail)
        assert len(second) == 2 * len(first)
        companions.close()
