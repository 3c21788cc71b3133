import errno
import weakref

import pytest

from snapshotter.fuse.inodes import Inodes


class Node:
    pass


def test_the_root_is_known_always_and_never_forgotten() -> None:
    inodes = Inodes("root")
    assert inodes.look_up("root") == 1
    inodes.forget([(1, 100)])
    assert inodes.node(1) == "root"


def test_a_node_is_held_until_every_lookup_is_forgotten() -> None:
    inodes: Inodes[object] = Inodes(Node())
    node = Node()
    gone = weakref.ref(node)
    nodeid = inodes.look_up(node)
    assert inodes.look_up(node) == nodeid == inodes.nodeid(node)
    del node
    inodes.forget([(nodeid, 1)])
    assert inodes.node(nodeid) is gone()
    inodes.forget([(nodeid, 1), (77, 1)])
    assert gone() is None
    with pytest.raises(OSError) as caught:  # noqa: PT011
        inodes.node(nodeid)
    assert caught.value.errno == errno.ESTALE
    assert len(inodes) == 1


def test_nodeids_are_never_used_again() -> None:
    inodes = Inodes("root")
    first = inodes.look_up("a")
    inodes.forget([(first, 1)])
    assert inodes.look_up("a") > first
    inodes.clear()
    assert inodes.nodeid("a") is None
    assert inodes.look_up("b") > first + 1


def test_a_kernel_cannot_know_more_than_the_limit() -> None:
    inodes = Inodes("root", limit=2)
    inodes.look_up("a")
    inodes.look_up("a")
    with pytest.raises(OSError) as caught:  # noqa: PT011
        inodes.look_up("b")
    assert caught.value.errno == errno.ENFILE
