"""Writes the kept inputs anew: ``python -m tests.fuzz.seeds``. Inputs found by fuzzing are kept
beside them, under names of their own.
"""

from __future__ import annotations

import gzip
import struct
import tempfile
from pathlib import Path

import zstandard

from snapshotter.cache_v1 import protocol
from snapshotter.digest import sha256
from snapshotter.framing import encode_frame
from snapshotter.projection.image_writer import write_image
from snapshotter.projection.tree import Inode
from snapshotter.store import chunk_table
from tests.support.fuzzing import CORPUS
from tests.support.images import Image, Layer, file, write_layout
from tests.support.odd_image import odd_image
from tests.support.trees import directory, regular
from tests.unit.cache_server.formats.tar_blocks import END, header, member, padded, pax


def tars() -> dict[str, bytes]:
    """The layers of the odd image, and sparse files of every kind."""
    with tempfile.TemporaryDirectory() as place:
        _, image = odd_image(Path(place))
    made = {f"odd-{number}": layer.tar for number, layer in enumerate(image.layers)}
    gnu = bytearray(header(b"s", kind=b"S", size=6, magic=b"ustar  \0"))
    gnu[386:410] = b"00000000000\x0000000000003\0"
    gnu[482:495] = b"\1" + b"00000000100\0"
    gnu[148:156] = b" " * 8
    gnu[148:156] = b"%06o\0 " % sum(gnu)
    more = b"00000000020\x0000000000003\0".ljust(512, b"\0")
    records = {
        b"GNU.sparse.map": b"1,2,7,1",
        b"GNU.sparse.numblocks": b"2",
        b"GNU.sparse.size": b"9",
    }
    made["sparse-gnu"] = bytes(gnu) + more + padded(b"abcdef") + END
    made["sparse-map"] = pax(records) + member(b"s", b"abc") + END
    return made


def images() -> dict[str, bytes]:
    """Metadata images: nothing, every kind of file, a directory of several blocks."""
    kinds = directory(
        file=regular(5, xattrs={b"user.a": b"1", b"trusted.overlay.x": b"2"}),
        large=regular((1 << 20) + 1),
        empty=regular(0),
        link=Inode(0o120777, target=b"t" * 99),
        long=Inode(0o120777, target=b"t" * 4095),
        device=Inode(0o020666, rdev=0x103),
        fifo=Inode(0o010600, mtime_ns=-1),
        below=directory(deeper=directory(f=regular())),
    )
    assert kinds.children is not None
    kinds.children[b"again"] = kinds.children[b"file"]
    wide = directory(**{f"name-{number:03}": regular(0) for number in range(300)})
    return {
        "kinds": bytes(write_image(kinds)),
        "nothing": bytes(write_image(directory())),
        "wide": bytes(write_image(wide)),
    }


def fuse_requests() -> dict[str, bytes]:
    """One request of each shape."""
    bodies = {
        1: b"name\0", 2: struct.pack("=Q", 3), 3: bytes(16), 14: bytes(8), 15: bytes(40),
        18: bytes(24), 22: struct.pack("=I4x", 64) + b"user.a\0", 23: bytes(8), 25: bytes(24),
        26: struct.pack("=IIIIII", 7, 45, 65536, 1 << 30, 1, 0) + bytes(40), 34: bytes(8),
        36: bytes(8), 38: b"", 39: bytes(32), 42: struct.pack("=I4x4Q", 2, 5, 1, 6, 2),
    }  # fmt: skip
    return {
        f"opcode-{opcode}": struct.pack(
            "=IIQQIIIHxx", 40 + len(body), opcode, 7, 1, 0, 0, 99, 0
        ) + body
        for opcode, body in bodies.items()
    }  # fmt: skip


def manifests() -> dict[str, bytes]:
    """An index, a manifest, a config."""
    image = Image([Layer([file("a", b"1")])], variant="v8", architecture="arm64")
    with tempfile.TemporaryDirectory() as place:
        write_layout(Path(place), {"a": [image, Image([Layer([file("b")])])]})
        blobs = (Path(place) / "blobs/sha256").iterdir()
        indexes = [data for data in (blob.read_bytes() for blob in blobs) if b'"manifests"' in data]
    return {"config": image.config, "index": indexes[0], "manifest": image.manifest}


def frames() -> dict[str, bytes]:
    """Frames of cache-v1: each request, and answers; and all of them as one stream."""
    digest = "sha256:" + "a" * 64
    requests: list[protocol.Request] = [
        protocol.Ping(),
        protocol.Prepare(image="oci:/x:y", architecture="amd64", progress=True),
        protocol.Open(handle=digest, architecture="arm/v7"),
        protocol.ChunkTable(content=digest, size=1 << 21),
        protocol.Fetch(chunks=[digest, digest], companions_bytes=9),
    ]
    responses: list[protocol.Response] = [
        protocol.Progress(phase="download", layer=digest, done_bytes=1, total_bytes=2),
        protocol.Data(length=3, sha256=digest, chunk=digest),
        protocol.Error(code="not_found", message="no"),
    ]
    payloads = [protocol.encode_request(request, token="t") for request in requests]
    payloads += [protocol.encode_response(response) for response in responses]
    made = {f"frame-{number}": encode_frame(data) for number, data in enumerate(payloads)}
    return made | {"stream": b"".join(made.values())}


def compressed() -> dict[str, bytes]:
    """Members and frames."""
    data = b"some text " * 300
    frame = zstandard.ZstdCompressor(write_checksum=True).compress(data)
    skippable = b"\x5a\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"12345"
    return {
        "gzip": gzip.compress(data, mtime=0) + gzip.compress(b"more", mtime=0),
        "zstd": skippable + frame + frame + skippable,
    }


def main() -> None:
    tables = {
        f"of-{count}": chunk_table.encode([sha256(b"%d" % n) for n in range(count)], count << 20)
        for count in (2, 5)
    }
    kinds = {
        "tar": tars(), "erofs": images(), "frames": frames(), "fuse": fuse_requests(),
        "chunk_table": tables, "manifest": manifests(), "compression": compressed(),
    }  # fmt: skip
    for kind, inputs in kinds.items():
        (CORPUS / kind).mkdir(parents=True, exist_ok=True)
        for name, data in inputs.items():
            (CORPUS / kind / name).write_bytes(data)


if __name__ == "__main__":
    main()
