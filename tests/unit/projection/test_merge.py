from __future__ import annotations

import stat

import pytest
from hypothesis import given, settings

from snapshotter.errors import InvalidInputError
from snapshotter.projection.merge import MergeBudget, apply_layer, merge_layers
from snapshotter.projection.tree import EntryKind, Inode, LayerEntry
from tests.support import apply_layers, trees
from tests.support.scratch import scratch_directory
from tests.support.trees import describe

DIR = stat.S_IFDIR | 0o700
REG = stat.S_IFREG | 0o644
LNK = stat.S_IFLNK | 0o777


def node(path: bytes, mode: int = REG, **more: object) -> LayerEntry:
    return LayerEntry(EntryKind.NODE, path, mode=mode, **more)  # type: ignore[arg-type]


def link(path: bytes, target: bytes, **more: object) -> LayerEntry:
    return LayerEntry(EntryKind.HARD_LINK, path, target=target, **more)  # type: ignore[arg-type]


def symlink(path: bytes, target: bytes) -> LayerEntry:
    return node(path, LNK, target=target)


def whiteout(path: bytes) -> LayerEntry:
    return LayerEntry(EntryKind.WHITEOUT, path)


def opaque(path: bytes) -> LayerEntry:
    return LayerEntry(EntryKind.OPAQUE, path)


def paths(*layers: list[LayerEntry]) -> set[bytes]:
    return set(describe(merge_layers(layers))) - {b""}


def at(root: Inode, path: bytes) -> Inode:
    for name in path.split(b"/"):
        assert root.children is not None
        root = root.children[name]
    return root


def test_no_layers_give_an_empty_root() -> None:
    root = merge_layers([])
    assert (root.mode, root.uid, root.gid, root.mtime_ns) == (0o40755, 0, 0, 0)
    assert root.children == {}


LOWER = [node(b"d", DIR), node(b"d/old"), node(b"f")]


@pytest.mark.parametrize(
    ("upper", "expected"),
    [
        ([whiteout(b"f")], {b"d", b"d/old"}),
        ([whiteout(b"d")], {b"f"}),
        ([whiteout(b"d/old")], {b"d", b"f"}),
        ([whiteout(b"none")], {b"d", b"d/old", b"f"}),
        ([opaque(b"d")], {b"d", b"f"}),
        ([opaque(b"")], set()),
        # What a marker is about is there as a directory, as an entry's parent is.
        ([whiteout(b"f/none"), whiteout(b"no/ne")], {b"d", b"d/old", b"f", b"no"}),
        ([opaque(b"none"), opaque(b"f")], {b"d", b"d/old", b"f", b"none"}),
        # Markers say nothing about their own layer, wherever they stand in it.
        ([node(b"d/new"), opaque(b"d")], {b"d", b"d/new", b"f"}),
        ([opaque(b"d"), node(b"d/new")], {b"d", b"d/new", b"f"}),
        ([node(b"f"), whiteout(b"f")], {b"d", b"d/old", b"f"}),
        ([whiteout(b"d"), node(b"d", DIR)], {b"d", b"f"}),
        ([node(b"d", DIR), whiteout(b"d")], {b"d", b"f"}),
        ([node(b"d")], {b"d", b"f"}),
        ([symlink(b"d", b"f")], {b"d", b"f"}),
        ([link(b"d", b"f")], {b"d", b"f"}),
        ([node(b"d", DIR)], {b"d", b"d/old", b"f"}),
        ([node(b"f", DIR), node(b"f/x")], {b"d", b"d/old", b"f", b"f/x"}),
    ],
)
def test_upper_layer_changes_lower(upper: list[LayerEntry], expected: set[bytes]) -> None:
    assert paths(LOWER, upper) == expected


def test_directory_over_directory_replaces_its_attributes() -> None:
    first = node(b"d", DIR, uid=1, gid=2, mtime_ns=3, xattrs={b"user.old": b"1"})
    second = node(b"d", stat.S_IFDIR | 0o1777, uid=4, gid=5, mtime_ns=6, xattrs={b"user.new": b""})
    found = at(merge_layers([[first, node(b"d/f")], [second]]), b"d")
    assert (found.mode, found.uid, found.gid, found.mtime_ns) == (0o41777, 4, 5, 6)
    assert found.xattrs == {b"user.new": b""}
    assert list(found.children or ()) == [b"f"]


def test_root_entry_sets_the_root() -> None:
    root = merge_layers([[node(b"a"), node(b"", DIR, uid=7, mtime_ns=8)]])
    assert (root.mode, root.uid, root.mtime_ns) == (DIR, 7, 8)
    assert list(root.children or ()) == [b"a"]


def test_last_duplicate_wins() -> None:
    root = merge_layers([[node(b"f", uid=1), symlink(b"f", b"x"), node(b"f", uid=3)]])
    assert at(root, b"f").uid == 3


def test_missing_parents_are_made() -> None:
    root = merge_layers([[node(b"a/b/c", uid=9)]])
    for path in (b"a", b"a/b"):
        made = at(root, path)
        assert (made.mode, made.uid, made.mtime_ns) == (0o40755, 0, 0)


@pytest.mark.parametrize(
    ("target", "real"),
    [
        (b"usr/lib", b"usr/lib/x"),
        (b"/usr/lib", b"usr/lib/x"),
        (b"../../../usr//lib/.", b"usr/lib/x"),
        (b"new/dir", b"new/dir/x"),
        (b"new/../usr/lib", b"usr/lib/x"),
        (b"/", b"x"),
        (b"other", b"usr/lib/x"),
    ],
)
def test_parent_links_are_followed_within_the_root(target: bytes, real: bytes) -> None:
    layer = [node(b"usr/lib", DIR), symlink(b"other", b"usr/lib"), symlink(b"lib", target)]
    root = merge_layers([[*layer, node(b"lib/x", uid=5)]])
    assert at(root, real).uid == 5
    assert stat.S_ISLNK(at(root, b"lib").mode)
    assert (b"new" in describe(root)) == real.startswith(b"new")
    assert describe(merge_layers([[node(b"lower")], [*layer, node(b"lib/x", uid=5)]])).keys() == {
        *describe(root),
        b"lower",
    }


def test_links_of_lower_layers_lead_nowhere() -> None:
    """Overlayfs lays a directory over them, which is what containerd's users see."""
    lower = [node(b"usr/lib/a"), symlink(b"lib", b"usr/lib"), node(b"f")]
    root = merge_layers([lower, [node(b"lib/x/y"), node(b"f/x")]])
    assert set(describe(root)) == {
        b"",
        b"usr",
        b"usr/lib",
        b"usr/lib/a",
        b"lib",
        b"lib/x",
        b"lib/x/y",
        b"f",
        b"f/x",
    }
    assert at(root, b"lib").mode == at(root, b"f").mode == stat.S_IFDIR | 0o755


def test_a_second_entry_of_a_directory_adds_xattrs() -> None:
    first = node(b"d", DIR, xattrs={b"user.a": b"1", b"user.b": b"1"})
    second = node(b"d", DIR, uid=2, xattrs={b"user.b": b"2"})
    found = at(merge_layers([[first, second]]), b"d")
    assert (found.uid, found.xattrs) == (2, {b"user.a": b"1", b"user.b": b"2"})
    assert at(merge_layers([[first], [second, second]]), b"d").xattrs == {b"user.b": b"2"}


@pytest.mark.parametrize(
    ("budget", "layer"),
    [
        (MergeBudget(names=2), [node(b"a"), node(b"b"), node(b"c")]),
        (MergeBudget(names=5), [node(b"a/b/c/d/e/f"), node(b"g")]),
        (MergeBudget(max_depth=3), [node(b"a/b/c/d/e")]),
        (MergeBudget(link_parts=3), [symlink(b"s", b"a/b"), node(b"s/x"), node(b"s/s/y"),
                                     symlink(b"t", b"s"), node(b"t/z")]),
    ],
    ids=["entries", "directories", "depth", "links"],
)  # fmt: skip
def test_what_exceeds_the_budget_is_refused(budget: MergeBudget, layer: list[LayerEntry]) -> None:
    with pytest.raises(InvalidInputError, match="layer entry"):
        merge_layers([layer], budget)


def test_entry_replaces_a_link_itself() -> None:
    lower = [node(b"real", DIR), symlink(b"s", b"real")]
    assert stat.S_ISDIR(at(merge_layers([lower, [node(b"s", DIR)]]), b"s").mode)


def test_replaced_directory_is_forgotten_as_parent() -> None:
    moved = [node(b"a/x"), symlink(b"a", b"b"), node(b"a/y"), node(b"a", DIR), node(b"a/z")]
    assert paths(moved) == {b"a", b"a/z", b"b", b"b/y"}


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ([node(b"f"), node(b"f/x")], r"'f/x': its parent b'f' is not a directory"),
        ([node(b"f"), symlink(b"s", b"f"), node(b"s/x")], r"'s/x': its parent b'f'"),
        ([symlink(b"s", b"s"), node(b"s/x")], r"'s/x': too many symbolic links"),
        ([link(b"h", b"gone")], r"'h': its target b'gone' is missing"),
        ([link(b"h", b"gone/f")], r"'h': its target b'gone/f' is missing"),
        ([node(b"d", DIR), link(b"h", b"d")], r"'h': its target b'd' is a directory"),
        ([link(b"h", b"")], r"'h': its target b'' is missing"),
        ([node(b"d/f"), link(b"d", b"d/f")], r"'d': its target b'd/f' lies in the directory"),
        ([node(b"f"), link(b"", b"f")], r"place of the root"),
        ([node(b"")], r"root is not a directory"),
        ([whiteout(b"")], r"whiteout of the root"),
        ([node(b"f", 0o644)], r"'f': unknown type 644"),
        ([LayerEntry(9, b"f")], r"'f': unknown kind 9"),
    ],
)
def test_bad_entries_are_refused(layer: list[LayerEntry], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        merge_layers([layer])


def test_hop_limit_is_255() -> None:
    links = [symlink(b"s%d" % n, b"s%d" % (n + 1)) for n in range(255)]
    chain = [*links, node(b"s255", DIR)]
    assert b"s255/x" in paths([*chain, node(b"s0/x")])
    with pytest.raises(InvalidInputError, match="too many"):
        merge_layers([[*chain, symlink(b"s", b"s0"), node(b"s/x")]])


class TestHardLinks:
    def test_share_the_inode(self) -> None:
        lower = [node(b"d/f", uid=3), symlink(b"s", b"/d")]
        root = merge_layers([lower, [link(b"h", b"s/f"), link(b"i", b"h")]])
        assert at(root, b"h") is at(root, b"d/f") is at(root, b"i")

    def test_final_component_is_not_followed(self) -> None:
        root = merge_layers([[node(b"f"), symlink(b"s", b"f"), link(b"h", b"s")]])
        assert at(root, b"h") is at(root, b"s")

    def test_to_what_its_own_parents_take_the_place_of(self) -> None:
        lower = [symlink(b"a", b"elsewhere")]
        with pytest.raises(InvalidInputError, match="'a/a': its target b'a' gave way"):
            merge_layers([lower, [link(b"a/a", b"a")]])

    def test_to_itself_is_refused(self) -> None:
        for target in (b"f", b"s/f"):
            with pytest.raises(InvalidInputError, match=r"'f': its target .* is itself"):
                merge_layers([[node(b"f"), symlink(b"s", b"."), link(b"f", target)]])

    def test_their_headers_change_the_file(self) -> None:
        header = {"mode": 0o4711, "uid": 7, "gid": 8, "mtime_ns": 9, "xattrs": {b"user.b": b"2"}}
        xattrs = {b"user.a": b"1", b"security.capability": b"c"}
        found = at(merge_layers([[node(b"f", xattrs=xattrs), link(b"h", b"f", **header)]]), b"f")
        assert (found.mode, found.uid, found.gid, found.mtime_ns) == (
            stat.S_IFREG | 0o4711,
            7,
            8,
            9,
        )
        assert found.xattrs == {b"user.a": b"1", b"user.b": b"2"}
        plain = merge_layers([[symlink(b"s", b"x"), link(b"h", b"s", **header)]])
        assert (at(plain, b"s").mode, at(plain, b"s").xattrs) == (LNK, {})

    def test_other_names_keep_the_inode_when_one_is_replaced(self) -> None:
        root = merge_layers([[node(b"f"), link(b"h", b"f", uid=1)], [node(b"f", uid=2)]])
        assert (at(root, b"f").uid, at(root, b"h").uid) == (2, 1)


class TestMarkersBehindLinks:
    LOWER = (node(b"usr/lib/old"), symlink(b"lib", b"usr/lib"))

    @pytest.mark.parametrize("marker", [whiteout(b"lib/old"), opaque(b"lib")])
    def test_lay_a_directory_over_links_of_lower_layers(self, marker: LayerEntry) -> None:
        root = merge_layers([[*self.LOWER], [marker]])
        assert set(describe(root)) == {b"", b"usr", b"usr/lib", b"usr/lib/old", b"lib"}
        assert at(root, b"lib").children == {}

    @pytest.mark.parametrize("marker", [whiteout(b"own/old"), opaque(b"own")])
    def test_follow_links_of_their_own_layer(self, marker: LayerEntry) -> None:
        upper = [symlink(b"own", b"usr/lib"), node(b"usr/lib/new"), marker]
        assert paths([*self.LOWER], upper) == {b"lib", b"own", b"usr", b"usr/lib", b"usr/lib/new"}

    @pytest.mark.parametrize("order", [1, -1])
    def test_do_not_depend_on_their_order(self, order: int) -> None:
        markers = [whiteout(b"d"), whiteout(b"d/f"), opaque(b"e/g"), whiteout(b"e")]
        lower = [node(b"d/f"), node(b"d/h"), node(b"e/g/f"), node(b"e/h")]
        assert paths(lower, markers[::order]) == set()

    def test_a_loop_of_their_own_layer_is_refused(self) -> None:
        with pytest.raises(InvalidInputError, match="'s/x': too many"):
            merge_layers([[symlink(b"s", b"s"), whiteout(b"s/x")]])


def test_link_permissions_are_linuxs() -> None:
    found = at(merge_layers([[node(b"s", stat.S_IFLNK, target=b"x", size=77)]]), b"s")
    assert (found.mode, found.size) == (LNK, 0)


def test_layers_do_not_share_inodes_between_trees() -> None:
    layer = [node(b"d", DIR), node(b"d/f", size=3, content=b"c" * 32)]
    first, second = merge_layers([layer]), merge_layers([layer])
    before = describe(second)
    apply_layer(first, [node(b"d", DIR, uid=1), whiteout(b"d/f"), node(b"d/f", uid=2)])
    assert describe(second) == before


def test_a_link_put_where_a_path_led_through_nothing_counts_for_the_next_entry() -> None:
    layer = [
        symlink(b"a", b"b/b/.."),
        link(b"a/b", b"a"),
        node(b"a/d"),
    ]
    with pytest.raises(InvalidInputError, match="too many symbolic links"):
        merge_layers([layer])


def test_depth_is_not_limited_by_recursion() -> None:
    path = b"/".join([b"d"] * 5000)
    merged = merge_layers([[node(path)], [whiteout(path)]], MergeBudget(max_depth=5000))
    assert len(describe(merged)) == 5000


STACKS = settings(max_examples=80)


@STACKS
@given(trees.layer_stacks())
def test_merges_and_refuses_as_a_directory_would(layers: list[list[LayerEntry]]) -> None:
    with scratch_directory() as root:
        merged, applier = merge_layers([]), apply_layers.Applier(root)
        for layer in layers:
            try:
                applier.apply(layer)
            except apply_layers.RefusedError:
                with pytest.raises(InvalidInputError):
                    apply_layer(merged, layer)
                return
            apply_layer(merged, layer)
            assert describe(merged) == describe(applier.read_back())


@STACKS
@given(trees.layer_stacks())
def test_merges_as_a_directory_would(layers: list[list[LayerEntry]]) -> None:
    with scratch_directory() as root:
        merged, applier = merge_layers([]), apply_layers.Applier(root)
        fitting: list[list[LayerEntry]] = []
        for layer in layers:
            fitting.append([])
            for entry in layer:
                if _merges([*fitting[:-1], [*fitting[-1], entry]]):
                    fitting[-1].append(entry)
            apply_layer(merged, fitting[-1])
            applier.apply(fitting[-1])
            assert describe(merged) == describe(applier.read_back())


def _merges(layers: list[list[LayerEntry]]) -> bool:
    try:
        merge_layers(layers)
    except InvalidInputError:
        return False
    return True
