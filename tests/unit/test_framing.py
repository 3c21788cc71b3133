"""Frames cut from a byte stream, however it was split."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshotter.errors import InvalidInputError
from snapshotter.framing import MAX_FRAME_BYTES, FrameDecoder, encode_frame


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=5), st.integers(1, 50))
def test_frames_survive_any_split(payloads, step):
    stream = b"".join(map(encode_frame, payloads))
    decoder = FrameDecoder()
    seen = []
    for at in range(0, len(stream), step):
        decoder.feed(stream[at : at + step])
        while (frame := decoder.next_frame()) is not None:
            seen.append(frame)
    assert seen == payloads
    assert decoder.is_empty


def test_a_body_follows_the_frame_that_announced_it():
    decoder = FrameDecoder()
    stream = encode_frame(b"head") + b"body" + encode_frame(b"next")
    for byte in stream[:10]:
        decoder.feed(bytes([byte]))
    assert decoder.next_frame() == b"head"
    assert decoder.next_body(4) is None
    decoder.feed(stream[10:])
    assert decoder.next_body(4) == b"body"
    assert decoder.next_frame() == b"next"


@pytest.mark.parametrize("length", [0, MAX_FRAME_BYTES + 1, 0xFFFFFFFF])
def test_a_length_out_of_range_is_refused_before_the_payload_comes(length):
    decoder = FrameDecoder()
    decoder.feed(length.to_bytes(4, "big"))
    with pytest.raises(InvalidInputError):
        decoder.next_frame()


@pytest.mark.parametrize("size", [0, MAX_FRAME_BYTES + 1])
def test_a_payload_out_of_range_is_not_sent(size):
    with pytest.raises(InvalidInputError):
        encode_frame(bytes(size))
