"""cache-v1 messages as bytes."""

import json

import pytest

from snapshotter import errors
from snapshotter.cache_v1 import protocol as p

REQUESTS = [
    p.Ping(),
    p.Prepare(image="docker://h/n:t", architecture="amd64", progress=True),
    p.Open(handle="h", architecture="arm64/v8"),
    p.ChunkTable(content="sha256:" + "0" * 64, size=1 << 30),
    p.Fetch(chunks=["sha256:" + "1" * 64], companions_bytes=5, handle="h"),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: type(r).__name__)
def test_a_request_comes_out_as_it_went_in(request_):
    envelope = p.decode_envelope(p.encode_request(request_, token="secret"))
    assert (envelope.version, envelope.token) == (p.VERSION, "secret")
    assert p.decode_request(envelope.request) == request_


def test_the_bytes_of_a_request_are_the_documented_ones():
    assert json.loads(p.encode_request(p.Ping())) == {
        "version": 2,
        "token": None,
        "request": {"op": "ping"},
    }


@pytest.mark.parametrize(
    "request_",
    [b'{"op": "ping", "more": 1}', b'{"op": "pong"}', b"{}", b"[]", b'{"op": "fetch"}',
     b'{"op": "chunk_table", "content": 3, "size": 1}', b"\xff"],
)  # fmt: skip
def test_a_bad_request_is_refused(request_):
    with pytest.raises(errors.InvalidInputError):
        p.decode_request(request_)


@pytest.mark.parametrize(
    "frame",
    [b"", b"{", b'{"version": 2}', b'{"version": "2", "token": null, "request": {}}',
     b'{"version": 2, "token": null, "request": {}, "x": 1}'],
)  # fmt: skip
def test_a_bad_envelope_is_refused(frame):
    with pytest.raises(errors.InvalidInputError):
        p.decode_envelope(frame)


def test_a_response_may_have_fields_we_do_not_know():
    data = p.decode_response(b'{"status": "data", "length": 3, "chunk": "c", "later": [1]}')
    assert data == p.Data(length=3, chunk="c")


def test_errors_cross_the_wire_as_their_kind():
    sent = p.error_response(errors.CorruptError("chunk c: digest differs"), chunk="c")
    received = p.decode_response(p.encode_response(sent))
    assert isinstance(received, p.Error)
    assert received.chunk == "c"
    error = p.error_from(received)
    assert type(error) is errors.CorruptError
    assert str(error) == "chunk c: digest differs"
