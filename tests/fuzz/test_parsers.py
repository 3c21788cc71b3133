"""Every parser of bytes from outside, given damaged ones: each target's first line must hold."""

from __future__ import annotations

import json
import struct
import zlib

import pytest

from cache_server.formats.compression import decompress
from cache_server.formats.tar import read_tar
from cache_server.limits import IngestLimits
from cache_server.sources.manifest import choose, parse_document, resolved
from snapshotter.cache_v1 import protocol
from snapshotter.digest import sha256
from snapshotter.errors import InvalidInputError, NotFoundError, UnsupportedError
from snapshotter.framing import FrameDecoder, encode_frame
from snapshotter.fuse import wire
from snapshotter.names import ContentName
from snapshotter.projection import erofs
from snapshotter.projection.image_reader import ImageReader
from snapshotter.projection.image_writer import write_image
from snapshotter.projection.merge import merge_layers
from snapshotter.projection.tree import LayerEntry, walk
from snapshotter.store import chunk_table
from tests.support.fuzzing import corpus, fuzz
from tests.support.images import Image, Layer, file
from tests.support.trees import describe

# With SNAPSHOTTER_LONG=1 a test takes many minutes.
pytestmark = pytest.mark.timeout(7200)
LIMITS = IngestLimits(layer_bytes=16 << 20, path_depth=200)


def tar(data: bytes) -> None:
    """A tar is refused, or it is a tree whose metadata image shows the same tree."""
    entries: list[LayerEntry] = []
    left = 0
    for event in read_tar([data], LIMITS):
        if isinstance(event, LayerEntry):
            assert not left
            entries.append(event)
            left = event.size
            event.content = b"c" * 32 if left else b""
        else:
            left -= len(event)
    assert not left
    tree = merge_layers([entries, entries])
    shown = ImageReader(write_image(tree)).to_tree()
    assert len(list(walk(shown))) <= len(list(walk(tree)))
    assert describe(ImageReader(write_image(shown)).to_tree()) == describe(shown)


def repair_tar(data: bytearray) -> None:
    for at in range(0, len(data) - 511, 512):
        if data[at + 257 : at + 262] == b"ustar":
            data[at + 148 : at + 156] = b" " * 8
            data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])


def test_tar() -> None:
    fuzz(tar, [data[: 40 << 10] for data in corpus("tar")], count=1500, repair=repair_tar)


def metadata_image(data: bytes) -> None:
    """An image is refused, or every name, xattr, target and content in it can be read."""
    reader = ImageReader(data)
    for _, inode in reader.walk():
        reader.xattrs(inode.nid)
        reader.content(inode.nid)
        if inode.is_directory:
            for entry in reader.entries(inode.nid):
                reader.lookup(inode.nid, entry.name)
    reader.to_tree()


def repair_image(data: bytearray) -> None:
    del data[len(data) - len(data) % erofs.BLOCK_SIZE :]
    begin = erofs.SUPERBLOCK_OFFSET
    if len(data) < erofs.BLOCK_SIZE:
        return
    found = erofs.Superblock.unpack(bytes(data[begin : begin + erofs.SUPERBLOCK_SIZE]))
    fields = {"root_nid": found.root_nid, "inode_count": found.inode_count, "uuid": found.uuid}
    for checksum in (0, None):
        stated = erofs.superblock_checksum(data) if checksum is None else checksum
        data[begin : begin + erofs.SUPERBLOCK_SIZE] = erofs.Superblock(
            block_count=len(data) // erofs.BLOCK_SIZE, checksum=stated, **fields
        ).pack()


def test_metadata_image() -> None:
    fuzz(metadata_image, corpus("erofs"), count=1200, repair=repair_image)


def frames(data: bytes) -> None:
    """A stream is refused, or it is frames; a frame is refused, or it is a message."""
    decoder = FrameDecoder()
    step = 7 if len(data) < 10_000 else 65_536
    for at in range(0, len(data), step):
        decoder.feed(data[at : at + step])
        while (payload := decoder.next_frame()) is not None:
            for decode in (_decode_request, protocol.decode_response):
                try:
                    decode(payload)
                except InvalidInputError:
                    pass


def _decode_request(payload: bytes) -> protocol.Request:
    return protocol.decode_request(protocol.decode_envelope(payload).request)


def repair_frame(data: bytearray) -> None:
    data[:4] = max(0, len(data) - 4).to_bytes(4)


def test_frames() -> None:
    fuzz(frames, corpus("frames"), count=8000, repair=repair_frame)


def test_deep_frames() -> None:
    for inside in (b"[" * 500_000, b'{"a":' * 150_000):
        frames(encode_frame(inside))
        frames(encode_frame(b'{"version":1,"token":null,"request":' + inside))


def fuse(data: bytes) -> None:
    """A request is refused, or it has a header and the message of its opcode."""
    view = memoryview(data)
    wire.unique_of(view)
    header = wire.decode_header(view)
    if header.opcode in wire.DECODERS:
        wire.decode_body(header, view)


def repair_request(data: bytearray) -> None:
    data[:4] = struct.pack("=I", len(data))


def test_fuse() -> None:
    fuzz(fuse, corpus("fuse"), count=20_000, repair=repair_request)


def table(data: bytes) -> None:
    """A table is refused, or it has a digest for each chunk, though its digest be right."""
    size = int.from_bytes(data[16:24], "little") or 1
    name = ContentName(sha256(data), size)
    digests = chunk_table.decode(data, name)
    assert chunk_table.content_name(digests, size) == name


def test_chunk_table() -> None:
    fuzz(table, corpus("chunk_table"), count=8000)


def manifest(data: bytes) -> None:
    """A document is refused, or it is an index to choose from or a manifest for its config."""
    document = parse_document(data, "fuzzed")
    if document.is_index:
        choose(document, "arm64/v8", "fuzzed")
    for config in corpus("manifest")[:1]:
        resolved(data, config, "arm64", "fuzzed")


def config(data: bytes) -> None:
    """A config is refused, or its layers are those of the manifest."""
    resolved(Image([Layer([file("a", b"1")])], architecture="arm64").manifest, data, "arm64", "x")


def test_manifest() -> None:
    allowed = (InvalidInputError, NotFoundError, UnsupportedError)
    deep = [b"[" * 200_000, b'{"a":' * 100_000, json.dumps({"layers": [1] * 9}).encode()]
    for target in (manifest, config):
        fuzz(target, [*corpus("manifest"), *deep], count=2000, allowed=allowed)


def blob(data: bytes) -> None:
    """A blob is refused, or decompressed in bounded pieces."""
    total = 0
    for piece in decompress([data]):
        assert len(piece) <= max(512 << 10, len(data))
        total += len(piece)
        if total > 64 << 20:
            break


def repair_gzip(data: bytearray) -> None:
    if data[:2] == b"\x1f\x8b" and len(data) > 18:
        data[3] = 0
        data[-8:-4] = zlib.crc32(b"more").to_bytes(4, "little")


def test_compression() -> None:
    fuzz(blob, corpus("compression"), count=4000, repair=repair_gzip)
