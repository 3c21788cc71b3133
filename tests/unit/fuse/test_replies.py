import errno
import struct

from hypothesis import given
from hypothesis import strategies as st

from snapshotter.fuse import replies
from snapshotter.vfs import Attr


def test_replies_begin_with_length_error_and_unique() -> None:
    assert replies.encode_reply(1 << 63 | 5, 100) == struct.pack("=IiQ", 116, 0, 1 << 63 | 5)
    assert replies.encode_error(5, errno.EIO) == struct.pack("=IiQ", 16, -5, 5)


def test_an_entry_as_the_kernel_reads_it() -> None:
    attr = Attr(
        ino=9, mode=0o100444, size=1025, nlink=2, uid=3, gid=4, rdev=5, blocks=3,
        atime_ns=1_000_000_002, mtime_ns=-1, ctime_ns=7,
    )  # fmt: skip
    payload = replies.encode_entry(
        8, attr, entry_timeout_ns=1_500_000_000, attr_timeout_ns=2**40 * 10**9, generation=6
    )
    assert len(payload) == 128
    assert struct.unpack("=QQQQIIQQQqqqIIIIIIIIII", payload) == (
        8, 6, 1, 2**40, 500_000_000, 0,
        9, 1025, 3, 1, -1, 0, 2, 999_999_999, 7, 0o100444, 2, 3, 4, 5, 4096, 0,
    )  # fmt: skip


def test_attributes_are_preceded_by_their_timeout() -> None:
    attr = Attr(1, 0o40755, 1, 0, 0, 0, 0, 0, 0, 0, 0)
    payload = replies.encode_attr(attr, timeout_ns=3_000_000_004)
    assert len(payload) == 104
    assert struct.unpack_from("=QIIQ", payload) == (3, 4, 0, 1)


def test_fixed_payloads() -> None:
    assert replies.encode_open(7, 2) == struct.pack("=QII", 7, 2, 0)
    assert replies.encode_xattr_size(5) == struct.pack("=II", 5, 0)
    assert replies.encode_statfs(blocks=4, free=2, files=9) == struct.pack(
        "=QQQQQIIII24x", 4, 2, 2, 9, 0, 4096, 255, 4096, 0
    )


def test_init_carries_the_high_flags_in_a_word_of_their_own() -> None:
    payload = replies.encode_init(
        replies.InitReply(
            minor=45, max_readahead=131072, flags=1 << 39 | 1 << 30, max_background=128,
            congestion_threshold=96, max_write=4096, max_pages=256,
        )
    )  # fmt: skip
    assert len(payload) == 64
    assert struct.unpack("=IIIIHHIIHHIIH22x", payload) == (
        7, 45, 131072, 1 << 30, 128, 96, 4096, 1, 256, 0, 1 << 7, 0, 0,
    )  # fmt: skip


@given(name=st.binary(min_size=1, max_size=255))
def test_directory_entries_are_padded_to_eight_bytes(name: bytes) -> None:
    entry = replies.encode_dirent(3, 1, 8, name)
    assert len(entry) % 8 == 0
    assert struct.unpack_from("=QQII", entry) == (3, 1, len(name), 8)
    assert entry[24 : 24 + len(name)] == name
    assert not any(entry[24 + len(name) :])


def test_notifications_have_no_unique() -> None:
    assert replies.encode_notify(replies.Notify.RESEND) == struct.pack("=IiQ", 16, 7, 0)
    assert replies.encode_inval_inode(5, 0, -1) == struct.pack("=IiQQqq", 40, 2, 0, 5, 0, -1)
    assert replies.encode_inval_entry(5, b"ab") == struct.pack(
        "=IiQQII3s", 35, 3, 0, 5, 2, 0, b"ab\0"
    )
