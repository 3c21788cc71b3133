"""Container images made in Python: layers from short declarations, OCI layouts, pushes.

image = Image([Layer([directory("etc"), file("etc/motd", b"hello\\n")])], env=["A=b"])
write_layout(path, {"v1": image})            # oci:path:v1
push(path, "v1", registry.address, "hello")  # docker://ADDRESS/hello:v1
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import zstandard

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
Compression = Literal["none", "gzip", "zstd"]
_LAYER_TYPES: dict[Compression, str] = {
    "none": "application/vnd.oci.image.layer.v1.tar",
    "gzip": "application/vnd.oci.image.layer.v1.tar+gzip",
    "zstd": "application/vnd.oci.image.layer.v1.tar+zstd",
}
MTIME_NS = 1_700_000_000_123_456_789


@dataclass(frozen=True, slots=True)
class Entry:
    """One member of a layer's tar."""

    info: tarfile.TarInfo
    data: bytes = b""


def file(path: str | bytes, data: bytes = b"", *, mode: int = 0o644, **attrs: Any) -> Entry:
    """A regular file. ``attrs``: uid, gid, mtime_ns, xattrs (name → bytes)."""
    return Entry(_info(path, tarfile.REGTYPE, mode, size=len(data), **attrs), data)


def directory(path: str | bytes, *, mode: int = 0o755, **attrs: Any) -> Entry:
    """A directory."""
    return Entry(_info(path, tarfile.DIRTYPE, mode, **attrs))


def symlink(path: str | bytes, target: str | bytes, **attrs: Any) -> Entry:
    """A symbolic link."""
    return Entry(_info(path, tarfile.SYMTYPE, 0o777, link=target, **attrs))


def hard_link(path: str | bytes, target: str | bytes, **attrs: Any) -> Entry:
    """A further name of ``target``, a path in the image."""
    return Entry(_info(path, tarfile.LNKTYPE, 0o644, link=target, **attrs))


def fifo(path: str | bytes, *, mode: int = 0o644, **attrs: Any) -> Entry:
    """A named pipe."""
    return Entry(_info(path, tarfile.FIFOTYPE, mode, **attrs))


def device(
    path: str | bytes,
    major: int,
    minor: int,
    *,
    block: bool = False,
    mode: int = 0o600,
    **attrs: Any,
) -> Entry:
    """A character or block device."""
    info = _info(path, tarfile.BLKTYPE if block else tarfile.CHRTYPE, mode, **attrs)
    info.devmajor, info.devminor = major, minor
    return Entry(info)


def whiteout(path: str) -> Entry:
    """Hides ``path`` of the layers below."""
    parent, _, name = path.rpartition("/")
    return file(f"{parent}/.wh.{name}" if parent else f".wh.{name}")


def opaque(path: str) -> Entry:
    """Hides what the layers below have in the directory ``path``."""
    return file(f"{path}/.wh..wh..opq" if path else ".wh..wh..opq")


def tar_bytes(entries: Sequence[Entry]) -> bytes:
    """The entries as a pax archive."""
    buffer = io.BytesIO()
    with tarfile.open(
        fileobj=buffer,
        mode="w",
        format=tarfile.PAX_FORMAT,
        encoding="utf-8",
        errors="surrogateescape",
    ) as archive:
        for entry in entries:
            archive.addfile(entry.info, io.BytesIO(entry.data))
    return buffer.getvalue()


class Layer:
    """A layer: its tar, the compressed blob, and what descriptors say of both."""

    def __init__(
        self,
        entries: Sequence[Entry] | bytes,
        *,
        compression: Compression = "gzip",
        blob: bytes | None = None,
    ) -> None:
        """``blob`` is the tar compressed already, in a way of its own."""
        self.tar = entries if isinstance(entries, bytes) else tar_bytes(entries)
        if blob is not None:
            self.blob = blob
        elif compression == "gzip":
            self.blob = gzip.compress(self.tar, 6, mtime=0)
        elif compression == "zstd":
            self.blob = zstandard.ZstdCompressor(level=3).compress(self.tar)
        else:
            self.blob = self.tar
        self.diff_id = sha256_of(self.tar)
        self.descriptor = descriptor(self.blob, _LAYER_TYPES[compression])


@dataclass(slots=True)
class Image:
    """What a manifest and its config say."""

    layers: Sequence[Layer]
    architecture: str = "amd64"
    variant: str | None = None
    os: str = "linux"
    env: Sequence[str] = ("PATH=/usr/local/bin:/usr/bin:/bin",)
    entrypoint: Sequence[str] | None = None
    cmd: Sequence[str] | None = ("/bin/sh",)
    user: str | None = None
    workdir: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def platform(self) -> dict[str, str]:
        """The platform as an index states it."""
        stated = {"architecture": self.architecture, "os": self.os}
        return {**stated, "variant": self.variant} if self.variant else stated

    @property
    def config(self) -> bytes:
        """The config blob."""
        run: dict[str, Any] = {"Env": list(self.env), "Labels": dict(self.labels)}
        for key, value in (("Entrypoint", self.entrypoint), ("Cmd", self.cmd)):
            if value is not None:
                run[key] = list(value)
        texts = {"User": self.user, "WorkingDir": self.workdir}
        run.update({key: text for key, text in texts.items() if text is not None})
        diff_ids = [layer.diff_id for layer in self.layers]
        return _json(
            {**self.platform, "config": run, "rootfs": {"type": "layers", "diff_ids": diff_ids}}
        )

    @property
    def manifest(self) -> bytes:
        """The manifest blob."""
        return _json(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST,
                "config": descriptor(self.config, CONFIG),
                "layers": [layer.descriptor for layer in self.layers],
            }
        )

    @property
    def digest(self) -> str:
        """The digest of the manifest."""
        return sha256_of(self.manifest)


def write_layout(path: Path, images: Mapping[str, Image | Sequence[Image]]) -> Path:
    """An OCI layout with these tags; a sequence of images becomes an index by platform."""
    blobs = path / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)
    entries = []
    for tag, tagged in images.items():
        if isinstance(tagged, Image):
            stated = descriptor(_store_image(blobs, tagged), MANIFEST)
        else:
            listed = [
                {**descriptor(_store_image(blobs, one), MANIFEST), "platform": one.platform}
                for one in tagged
            ]
            index = _json({"schemaVersion": 2, "mediaType": INDEX, "manifests": listed})
            _store(blobs, index)
            stated = descriptor(index, INDEX)
        entries.append({**stated, "annotations": {"org.opencontainers.image.ref.name": tag}})
    (path / "index.json").write_bytes(_json({"schemaVersion": 2, "manifests": entries}))
    (path / "oci-layout").write_bytes(_json({"imageLayoutVersion": "1.0.0"}))
    return path


def push(layout: Path, tag: str, address: str, name: str, *, remote_tag: str | None = None) -> str:
    """Copies a tag of a layout to ``ADDRESS/NAME``, byte for byte; returns its digest."""
    entries = json.loads((layout / "index.json").read_bytes())["manifests"]
    wanted = next(
        entry
        for entry in entries
        if entry.get("annotations", {}).get("org.opencontainers.image.ref.name") == tag
    )
    with httpx.Client(base_url=f"http://{address}", timeout=60) as client:
        _push_manifest(client, layout, wanted, name, remote_tag or tag)
    return str(wanted["digest"])


def descriptor(data: bytes, media_type: str) -> dict[str, Any]:
    """An OCI descriptor of ``data``."""
    return {"mediaType": media_type, "digest": sha256_of(data), "size": len(data)}


def sha256_of(data: bytes) -> str:
    """``sha256:<hex>`` of ``data``."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def _info(
    path: str | bytes,
    kind: bytes,
    mode: int,
    *,
    size: int = 0,
    link: str | bytes = "",
    uid: int = 0,
    gid: int = 0,
    mtime_ns: int = MTIME_NS,
    xattrs: Mapping[str, bytes] | None = None,
) -> tarfile.TarInfo:
    info = tarfile.TarInfo(_text(path))
    info.type, info.mode, info.size, info.linkname = kind, mode, size, _text(link)
    info.uid, info.gid, info.mtime = uid, gid, max(mtime_ns // 10**9, 0)
    info.pax_headers = {
        "SCHILY.xattr." + name: _text(value) for name, value in (xattrs or {}).items()
    }
    if mtime_ns % 10**9 or mtime_ns < 0:
        sign, magnitude = ("-", -mtime_ns) if mtime_ns < 0 else ("", mtime_ns)
        info.pax_headers["mtime"] = f"{sign}{magnitude // 10**9}.{magnitude % 10**9:09}"
    return info


def _text(raw: str | bytes) -> str:
    return raw if isinstance(raw, str) else raw.decode("utf-8", "surrogateescape")


def _store_image(blobs: Path, image: Image) -> bytes:
    for layer in image.layers:
        _store(blobs, layer.blob)
    _store(blobs, image.config)
    _store(blobs, image.manifest)
    return image.manifest


def _store(blobs: Path, data: bytes) -> None:
    (blobs / sha256_of(data).removeprefix("sha256:")).write_bytes(data)


def _push_manifest(
    client: httpx.Client, layout: Path, wanted: Mapping[str, Any], name: str, target: str
) -> None:
    content = _blob(layout, wanted["digest"])
    manifest = json.loads(content)
    for child in manifest.get("manifests", []):
        _push_manifest(client, layout, child, name, child["digest"])
    if "config" in manifest:
        for blob in [manifest["config"], *manifest["layers"]]:
            _push_blob(client, layout, blob["digest"], name)
    client.put(
        f"/v2/{name}/manifests/{target}",
        content=content,
        headers={"Content-Type": wanted["mediaType"]},
    ).raise_for_status()


def _push_blob(client: httpx.Client, layout: Path, digest: str, name: str) -> None:
    if client.head(f"/v2/{name}/blobs/{digest}").status_code == 200:
        return
    started = client.post(f"/v2/{name}/blobs/uploads/").raise_for_status()
    location = httpx.URL(started.headers["Location"]).copy_merge_params({"digest": digest})
    client.put(location, content=_blob(layout, digest)).raise_for_status()


def _blob(layout: Path, digest: str) -> bytes:
    return (layout / "blobs" / "sha256" / digest.removeprefix("sha256:")).read_bytes()


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()
