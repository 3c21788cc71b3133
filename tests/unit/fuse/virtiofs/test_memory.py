import mmap
import os
from collections.abc import Iterator

import pytest

from snapshotter.errors import InvalidInputError
from snapshotter.fuse.virtiofs.memory import GuestMemory, RegionLayout
from tests.support.vhost_user_front_end import sealed_memory

PAGE = mmap.PAGESIZE
USER = 0x7F00_0000_0000


@pytest.fixture
def file() -> Iterator[int]:
    descriptor = sealed_memory(16 * PAGE)
    os.pwrite(descriptor, b"".join(bytes([number]) * PAGE for number in range(16)), 0)
    yield descriptor
    os.close(descriptor)


def three_regions(file: int) -> GuestMemory:
    """Two that touch for the guest, but lie apart in the file; a third far away."""
    layouts = [
        RegionLayout(0, 2 * PAGE, USER + 8 * PAGE, 4 * PAGE),
        RegionLayout(2 * PAGE, 3 * PAGE, USER, 0),
        RegionLayout(1 << 40, PAGE, USER + 20 * PAGE, 10 * PAGE),
    ]
    return GuestMemory(layouts, [file] * 3)


def test_an_address_is_found_in_its_region(file: int) -> None:
    memory = three_regions(file)
    (span,) = memory.spans(PAGE - 1, 2)
    assert bytes(span) == b"\x04\x05"
    assert bytes(memory.spans((1 << 40) + PAGE - 1, 1)[0]) == b"\x0a"
    assert memory.spans(5, 0) == []


def test_a_buffer_that_goes_on_in_the_next_region_is_cut(file: int) -> None:
    pieces = three_regions(file).spans(2 * PAGE - 2, PAGE + 4)
    assert [len(piece) for piece in pieces] == [2, PAGE + 2]
    assert b"".join(pieces) == b"\x05\x05" + bytes(PAGE) + b"\x01\x01"


def test_views_write_into_the_guest(file: int) -> None:
    three_regions(file).spans(0, 3)[0][:] = b"abc"
    assert os.pread(file, 3, 4 * PAGE) == b"abc"


@pytest.mark.parametrize(
    ("address", "size"),
    [
        (5 * PAGE, 1),
        (5 * PAGE - 1, 2),
        ((1 << 40) - 1, 1),
        ((1 << 40), PAGE + 1),
        ((1 << 64) - 1, 1),
        ((1 << 64) - 1, 1 << 32),
        (0, 1 << 32),
    ],
)
def test_nothing_outside_the_regions_is_given_out(file: int, address: int, size: int) -> None:
    with pytest.raises(InvalidInputError):
        three_regions(file).spans(address, size)


def test_rings_are_found_by_user_address(file: int) -> None:
    memory = three_regions(file)
    assert bytes(memory.at_user_address(USER + 9 * PAGE, 2, alignment=16)) == b"\x05\x05"


@pytest.mark.parametrize(
    ("address", "size", "alignment"),
    [
        (USER - 1, 4, 1),
        (USER + 3 * PAGE - 1, 2, 1),  # no ring goes on in another region
        (USER + 9 * PAGE + 2, 2, 4),
        (0, 1, 1),
        ((1 << 64) - 1, 4, 1),
    ],
)
def test_rings_elsewhere_are_refused(file: int, address: int, size: int, alignment: int) -> None:
    with pytest.raises(InvalidInputError):
        three_regions(file).at_user_address(address, size, alignment=alignment)


@pytest.mark.parametrize(
    "layout",
    [
        RegionLayout(0, 0, USER, 0),
        RegionLayout((1 << 64) - PAGE, 2 * PAGE, USER, 0),
        RegionLayout(0, 2 * PAGE, (1 << 64) - PAGE, 0),
        RegionLayout(0, 1 << 47, USER, 0),
        RegionLayout(0, PAGE, USER, 1 << 63),
        RegionLayout(0, 17 * PAGE, USER, 0),
        RegionLayout(0, PAGE, USER, 16 * PAGE),
    ],
)
def test_regions_that_cannot_be_are_refused(file: int, layout: RegionLayout) -> None:
    with pytest.raises(InvalidInputError):
        GuestMemory([layout], [file])


def test_overlapping_regions_and_odd_numbers_are_refused(file: int) -> None:
    one = RegionLayout(0, 2 * PAGE, USER, 0)
    for layouts, count in (
        ([one, RegionLayout(PAGE, PAGE, USER + 4 * PAGE, 0)], 2),
        ([one], 0),
        ([one], 2),
        ([], 0),
        ([RegionLayout(n * PAGE, PAGE, USER + n * PAGE, 0) for n in range(9)], 9),
    ):
        with pytest.raises(InvalidInputError):
            GuestMemory(layouts, [file] * count)


def test_memory_that_may_shrink_is_refused() -> None:
    descriptor = os.memfd_create("unsealed", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, PAGE)
    try:
        with pytest.raises(InvalidInputError, match="may shrink"):
            GuestMemory([RegionLayout(0, PAGE, USER, 0)], [descriptor])
    finally:
        os.close(descriptor)
    null = os.open("/dev/null", os.O_RDWR)
    try:
        with pytest.raises(InvalidInputError, match="may shrink"):
            GuestMemory([RegionLayout(0, PAGE, USER, 0)], [null])
    finally:
        os.close(null)
