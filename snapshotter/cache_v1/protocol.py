"""cache-v1 messages: what snapshotter and cache_server say to each other (docs/protocol).

A request is ``{"version", "token", "request": {"op", …}}``; unknown fields are refused. A response
is one flat object with ``status``; unknown fields are ignored, so that servers may grow. Only a
``data`` response is followed by a raw body, of exactly ``length`` bytes.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from snapshotter.decoding import DECODE_ERRORS
from snapshotter.errors import InvalidInputError, SnapshotterError, from_code
from snapshotter.names import CHUNK_SIZE, MAX_CONTENT_SIZE, MAX_PATH_BYTES

VERSION = 2
MAX_FETCH_CHUNKS = 256
MAX_LIST_ENTRIES = 256
MAX_READ_BYTES = CHUNK_SIZE
MAX_CHUNK_TABLE_BYTES = 64 << 20


class _Request(msgspec.Struct, tag_field="op", forbid_unknown_fields=True):
    pass


class Ping(_Request, tag="ping"):
    """Is the server there, and what can it do?"""


class Prepare(_Request, tag="prepare", kw_only=True):
    """Make an image ready: find its manifest, ingest its layers, merge its metadata image."""

    image: str
    architecture: str
    refresh: bool = False
    progress: bool = False
    merge: bool = True
    authfile: str | None = None


class Open(_Request, tag="open", kw_only=True):
    """Find an image that was prepared, by handle or chain id; never consults a mutable tag.

    With ``documents`` the answer has the image's manifest and the indexes that led to it.
    """

    handle: str | None = None
    chain: str | None = None
    architecture: str
    merge: bool = True
    documents: bool = False


class ChunkTable(_Request, tag="chunk_table", kw_only=True):
    """The chunk table of content larger than one chunk; its SHA-256 is the content id."""

    content: str
    size: int


class Fetch(_Request, tag="fetch", kw_only=True):
    """Chunks by digest, in order; then, as the server sees fit, companions."""

    chunks: list[str]
    companions_bytes: int = 0
    handle: str | None = None


Path = Annotated[
    list[Annotated[int, msgspec.Meta(ge=0, le=255)]], msgspec.Meta(max_length=MAX_PATH_BYTES)
]
"""The bytes of a path relative to the image's root; none for the root itself."""
Offset = Annotated[int, msgspec.Meta(ge=0, le=MAX_CONTENT_SIZE)]


class List(_Request, tag="list", kw_only=True):
    """Names and attributes in a directory, from ``offset`` (0, or a ``next_offset``) on."""

    digest: str
    path: Path
    offset: Offset


class Stat(_Request, tag="stat", kw_only=True):
    """The attributes of a file, directory or link, which is not followed."""

    digest: str
    path: Path


class Read(_Request, tag="read", kw_only=True):
    """``length`` bytes of a regular file from ``offset`` on."""

    digest: str
    path: Path
    offset: Offset
    length: Annotated[int, msgspec.Meta(ge=1, le=MAX_READ_BYTES)]


class Remove(_Request, tag="remove", kw_only=True):
    """Forget an image, or one of its names where it has several; for operators, not snapshotters.

    ``image`` is a name that it was prepared by, its digest or its handle.
    """

    image: str
    architecture: str | None = None
    dry_run: bool = False


class Collect(_Request, tag="collect", kw_only=True):
    """Remove content that no image needs; for operators, not snapshotters."""

    dry_run: bool = False


Request = Ping | Prepare | Open | ChunkTable | Fetch | List | Stat | Read | Remove | Collect


class _Response(msgspec.Struct, tag_field="status", kw_only=True, omit_defaults=True):
    pass


class Ready(_Response, tag="ready"):
    """The answer to ping. ``counters`` are totals since the server's start, by name."""

    features: list[str]
    counters: dict[str, int] = {}


class Progress(_Response, tag="progress"):
    """How far a prepare is. ``phase`` is resolve, download, index or merge."""

    phase: str
    layer: str | None = None
    done_bytes: int = 0
    total_bytes: int | None = None


class Totals(msgspec.Struct, frozen=True):
    """Regular files of an image and the bytes in them, uncompressed."""

    files: int
    bytes: int


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """One layer of a prepared image; ``size`` is that of the blob."""

    digest: str
    diff_id: str
    chain_id: str
    size: int
    media_type: str


class MetadataImage(msgspec.Struct, frozen=True):
    """The content (``sha256:…`` of its content id) and size of a metadata image."""

    content: str
    size: int


class Prepared(_Response, tag="prepared"):
    """An image that is ready to be mounted. ``metadata_generation`` names the layout of metadata
    images; clients compare it and nothing else. ``documents``, where asked for, are the texts of
    the indexes that led to the manifest, if any, and last of the manifest itself.
    """

    image_handle: str
    metadata_generation: str
    digest: str | None
    architecture: str
    env: dict[str, str]
    entrypoint: list[str] | None
    cmd: list[str] | None
    config: str | None
    totals: Totals | None
    layers: list[Layer]
    metadata_image: MetadataImage | None
    documents: list[str] | None = None


class Data(_Response, tag="data"):
    """``length`` raw bytes follow. ``chunk`` names a chunk that was asked for; ``object`` names a
    whole object that was not (a companion). ``sha256`` is that of the body, where it is sent.
    """

    length: int
    sha256: str | None = None
    chunk: str | None = None
    companion: bool = False
    object: str | None = None


class Metadata(_Response, tag="metadata"):
    """Attributes of one name. ``mode`` has its type bits; ``mtime`` is in seconds, rounded down,
    and ``mtime_nsec`` what is beyond them; ``target`` holds the bytes of a symbolic link.
    """

    kind: str
    size: int
    mode: int
    uid: int
    gid: int
    inode: int
    nlink: int
    mtime: int
    mtime_nsec: int
    target: list[int] | None


class Entries(_Response, tag="entries"):
    """A part of a directory, ``metadata`` in the order of ``names``, which are sorted as bytes."""

    names: list[list[int]]
    metadata: list[Metadata]
    next_offset: int | None


class Removed(_Response, tag="removed"):
    """The answer to remove: the image's handle, the names that are gone, and whether it is, too."""

    handle: str
    names: list[str]
    whole: bool


class Collected(_Response, tag="collected"):
    """The answer to collect: what was removed, or would be, and the bytes that it took."""

    layers: int = 0
    chunk_tables: int = 0
    chunks: int = 0
    packs_dropped: int = 0
    packs_rewritten: int = 0
    freed_bytes: int = 0


class Done(_Response, tag="done"):
    """Nothing more comes for this request."""


class Error(_Response, tag="error"):
    """The request failed; with ``chunk``, only that chunk did."""

    code: str
    message: str
    chunk: str | None = None


Response = (
    Ready | Progress | Prepared | Data | Metadata | Entries | Removed | Collected | Done | Error
)


class Envelope(msgspec.Struct, forbid_unknown_fields=True):
    """A request as it stands in its frame; ``request`` is decoded after token and version."""

    version: int
    token: str | None
    request: msgspec.Raw


_encoder = msgspec.json.Encoder()
_response_decoder: msgspec.json.Decoder[Response] = msgspec.json.Decoder(Response)
_envelope_decoder = msgspec.json.Decoder(Envelope)
_request_decoder: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)


def encode_request(request: Request, *, token: str | None = None) -> bytes:
    """A request frame's payload."""
    return _encoder.encode({"version": VERSION, "token": token, "request": request})


def decode_envelope(payload: bytes) -> Envelope:
    """The outer part of a request frame; InvalidInputError if it is not one."""
    try:
        str(payload, "utf-8")  # what stays raw is not looked into by the decoder
        return _envelope_decoder.decode(payload)
    except DECODE_ERRORS as error:
        raise InvalidInputError(f"request frame: {error}") from error


def decode_request(raw: bytes | msgspec.Raw) -> Request:
    """The inner part of a request frame; InvalidInputError names the bad op or field."""
    try:
        return _request_decoder.decode(raw)
    except DECODE_ERRORS as error:
        raise InvalidInputError(f"request: {error}") from error


def encode_response(response: Response) -> bytes:
    """A response frame's payload."""
    return _encoder.encode(response)


def decode_response(payload: bytes) -> Response:
    """A response from its frame; InvalidInputError if it is none."""
    try:
        return _response_decoder.decode(payload)
    except DECODE_ERRORS as error:
        raise InvalidInputError(f"response frame: {error}") from error


def error_response(error: SnapshotterError, *, chunk: str | None = None) -> Error:
    """How an error of ours is told to the other side."""
    code = error.code if error.code in _CODES else "request_failed"
    return Error(code=code, message=str(error), chunk=chunk)


def error_from(response: Error) -> SnapshotterError:
    """The error of ours that an error response stands for."""
    return from_code(response.code, response.message)


_CODES = frozenset(
    (
        "not_found",
        "permission_denied",
        "unsupported_version",
        "busy",
        "invalid_request",
        "unavailable",
        "corrupt",
        "request_failed",
    )
)
