"""Shows the whole path on this machine, without a registry: layout, pull, mount, run, clean up.

An OCI layout is made from a few of this machine's own programs and a directory of filler files,
so that it shows how little of an image a command needs. Everything lives in ``.quickstart/``
(or the directory given); at the end nothing stays mounted or running. Needs root. It prints one
line.
"""

import contextlib
import gzip
import hashlib
import io
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
BASE = Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else HERE / ".quickstart"
LAYOUT = BASE / "oci"
ROOT = BASE / "root"
MOUNT = BASE / "mnt"

PROGRAMS = ("sh", "ls", "cat", "sha256sum")
FILLER_FILES = 200
FILLER_BYTES = 64 << 10
COMMAND = ("sh", "-c", "ls / && cat /etc/greeting && sha256sum /opt/filler/000")
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def main() -> int:
    """Makes the image, mounts it, runs a command in it twice, and reports."""
    if os.geteuid() != 0:
        print("quickstart: it mounts file systems, so it needs root", file=sys.stderr)
        return 1
    shutil.rmtree(ROOT, ignore_errors=True)  # the first run is to be a cold one
    MOUNT.mkdir(parents=True, exist_ok=True)
    make_layout(LAYOUT)
    image = f"oci:{LAYOUT}:demo"
    try:
        pulled = json.loads(snapshotter("pull", image, "--json"))
        mounted = json.loads(snapshotter("mount", image, str(MOUNT), "--json"))["mount"]
        names = len(list((MOUNT / "opt/filler").iterdir()))
        cold_s = timed_run(image)
        warm_s = timed_run(image)
        snapshotter("umount", mounted["id"])
        fetched = stored_bytes(ROOT / "objects")
    except BaseException:
        with contextlib.suppress(subprocess.CalledProcessError):
            snapshotter("umount", "--lazy", str(MOUNT))
        raise
    finally:
        snapshotter("daemon", "stop")
    total = pulled["prepared"]["totals"]["bytes"]
    print(
        f"quickstart: {names} filler files listed; run cold {cold_s * 1e3:.0f} ms, "
        f"warm {warm_s * 1e3:.0f} ms; {fetched / 2**20:.1f} of {total / 2**20:.1f} MiB fetched"
    )
    return 0


def snapshotter(*arguments: str) -> str:
    """Runs the command line with a root of our own; its output."""
    command = [sys.executable, "-m", "snapshotter.cli.main", "--root", str(ROOT), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return done.stdout


def timed_run(image: str) -> float:
    """Seconds that ``snapshotter run`` of COMMAND takes, from start to end."""
    began = time.monotonic()
    snapshotter("run", image, "--", *COMMAND)
    return time.monotonic() - began


def stored_bytes(objects: Path) -> int:
    """Bytes of file content, and of the image's metadata, that came to this machine."""
    return sum(path.stat().st_size for path in objects.rglob("*") if path.is_file())


def make_layout(layout: Path) -> None:
    """Writes a one-layer OCI image layout (image-spec v1) with the tag ``demo``."""
    shutil.rmtree(layout, ignore_errors=True)
    (layout / "blobs/sha256").mkdir(parents=True)
    tar = make_layer()
    architecture = ARCHITECTURES.get(platform.machine(), platform.machine())
    config = {
        "architecture": architecture,
        "os": "linux",
        "config": {"Env": ["PATH=/usr/bin:/bin"], "Cmd": ["sh"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(tar).hexdigest()}"]},
    }
    kind = "application/vnd.oci.image"
    layer = write_blob(layout, f"{kind}.layer.v1.tar+gzip", gzip.compress(tar, 1, mtime=0))
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{kind}.manifest.v1+json",
        "config": write_blob(layout, f"{kind}.config.v1+json", json.dumps(config).encode()),
        "layers": [layer],
    }
    entry = write_blob(layout, f"{kind}.manifest.v1+json", json.dumps(manifest).encode())
    entry["annotations"] = {"org.opencontainers.image.ref.name": "demo"}
    entry["platform"] = {"architecture": architecture, "os": "linux"}
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    (layout / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))


def write_blob(layout: Path, media_type: str, data: bytes) -> dict[str, object]:
    """Stores a blob by its digest; its descriptor."""
    digest = hashlib.sha256(data).hexdigest()
    (layout / "blobs/sha256" / digest).write_bytes(data)
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}


def make_layer() -> bytes:
    """A tar of PROGRAMS with their libraries, a greeting, and files that nobody will open."""
    buffer = io.BytesIO()
    noise = random.Random(1)  # the same image every time
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for source in program_files():
            add_file(tar, source, Path(source).read_bytes(), mode=0o755)
        add_file(tar, "/etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n")
        add_file(tar, "/etc/greeting", b"hello from a lazy image\n")
        for index in range(FILLER_FILES):
            add_file(tar, f"/opt/filler/{index:03}", noise.randbytes(FILLER_BYTES))
    return buffer.getvalue()


def add_file(tar: tarfile.TarFile, path: str, data: bytes, *, mode: int = 0o644) -> None:
    """Adds one regular file of root."""
    entry = tarfile.TarInfo(path.lstrip("/"))
    entry.size, entry.mode = len(data), mode
    tar.addfile(entry, io.BytesIO(data))


def program_files() -> list[str]:
    """Where PROGRAMS are on this machine, and every library that ldd finds for them."""
    files: list[str] = []
    for program in PROGRAMS:
        path = shutil.which(program, path="/usr/bin:/bin")
        if path is None:
            raise SystemExit(f"quickstart: this machine has no {program}")
        listed = subprocess.run(["ldd", path], stdout=subprocess.PIPE, text=True, check=True)
        words = listed.stdout.split()
        files += [path, *(word for word in words if word.startswith("/"))]
    return sorted(set(files))


if __name__ == "__main__":
    sys.exit(main())
