import errno

import pytest

from snapshotter.fuse.handles import Handles


class Item:
    is_closed = False

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


def refused(call: object, *arguments: object) -> int:
    with pytest.raises(OSError) as caught:  # noqa: PT011
        call(*arguments)  # type: ignore[operator]
    return caught.value.errno or 0


def test_what_is_in_use_is_closed_only_after_that() -> None:
    handles: Handles[Item] = Handles()
    item = Item()
    handle = handles.add(item, 7)
    in_use = handles.get(handle)
    assert in_use.nodeid == 7
    handles.remove(handle)
    assert not item.is_closed
    del in_use
    assert item.is_closed
    assert refused(handles.get, handle) == errno.EBADF
    assert refused(handles.remove, handle) == errno.EBADF


def test_what_is_over_the_limit_is_closed() -> None:
    handles: Handles[Item] = Handles(limit=1)
    kept, refused_item = Item(), Item()
    handle = handles.add(kept, 1)
    assert refused(handles.add, refused_item, 1) == errno.ENFILE
    assert refused_item.is_closed
    assert not kept.is_closed
    handles.clear()
    assert kept.is_closed
    assert handles.add(Item(), 1) != handle
