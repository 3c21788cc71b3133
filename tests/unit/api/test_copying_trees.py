"""Any tree goes in and comes out as it was."""

import os
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from snapshotter.api import copying
from snapshotter.api.cancelling import Cancellation
from snapshotter.api.paths_within import Owner
from tests.support.compare_trees import compare_trees

Tree = dict[bytes, object]

NAMES = st.sampled_from([b"a", b"b", b"\xff", b" \n", b".hidden", b"x" * 255])
MODES = st.sampled_from([0o000, 0o444, 0o600, 0o755, 0o1777])
FILES = st.tuples(st.binary(max_size=20), st.integers(0, 1 << 20), MODES, st.booleans())
"""Content, where it begins (a hole is before it), mode, and whether it has an attribute."""
LINKS = st.sampled_from([b"a", b"/", b"../..", b"\xff/none"])
TREES: st.SearchStrategy[Tree] = st.recursive(
    st.dictionaries(NAMES, FILES | LINKS, max_size=3),
    lambda trees: st.dictionaries(NAMES, FILES | LINKS | trees, max_size=3),
    max_leaves=10,
)


def make(directory: bytes, tree: Tree, made: list[bytes]) -> None:
    """Writes a tree; each second file of the same content is a hard link of the first."""
    os.mkdir(directory)
    for name, entry in tree.items():
        path = os.path.join(directory, name)
        match entry:
            case dict():
                make(path, entry, made)
            case bytes():
                os.symlink(entry, path)
            case (bytes() as content, int() as start, int() as mode, bool() as is_marked):
                if made and not content:
                    os.link(made[-1], path)
                    continue
                made.append(path)
                with open(path, "wb") as file:
                    file.truncate(start)
                    file.seek(start)
                    file.write(content)
                if is_marked:
                    os.setxattr(path, b"user.mark", content)
                os.chmod(path, mode)
        os.utime(path, ns=(1, 10**18 + len(name)), follow_symlinks=False)
    os.utime(directory, ns=(1, 10**18))


@given(TREES)
def test_a_tree_comes_back_as_it_went(tree: Tree) -> None:
    with tempfile.TemporaryDirectory() as base:
        host, box = Path(base, "host"), Path(base, "box")
        box.mkdir()
        make(os.fsencode(host), tree, [])
        root = os.open(box, os.O_PATH)
        try:
            cancellation = Cancellation()
            copying.copy_in(root, str(host), "/t", owner=Owner(0, 0), cancellation=cancellation)
            copying.copy_out(root, "/t", f"{base}/back", cancellation=cancellation)
        finally:
            os.close(root)
        assert compare_trees(host, box / "t") == []
        assert compare_trees(host, Path(base, "back")) == []
