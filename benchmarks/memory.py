"""How much memory each process keeps, over many mounts, many faults, many images, and an import.

    python -m benchmarks.memory

``RssAnon`` is what a process has allocated for itself (proc(5)); pages of files that it has mapped
are shared and not counted. A growth is taken from after a warm-up to the end, so that what is
allocated once, such as modules and pools, does not hide a leak or pretend one.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

from benchmarks import machine
from snapshotter.kernel_view import syscalls
from snapshotter.paths import Paths
from snapshotter.service import control
from snapshotter.service.control_client import ControlClient
from tests.support.images import Image, Layer, directory, file, write_layout
from tests.support.product import Product

KIB = 1 << 10
MIB = 1 << 20
_FILES_PER_DIRECTORY = 500

Memory = dict[str, int]
"""RssAnon in bytes by process."""


def measure(product: Product) -> Memory:
    """What every process of the product has allocated now."""
    pids = product.status()["processes"]
    return {
        name: _status_bytes(Path(f"/proc/{pid}/status"), "RssAnon")
        for name, pid in sorted(pids.items())
        if pid is not None
    }


def growth(before: Memory, after: Memory) -> Memory:
    return {name: after[name] - before[name] for name in after if name in before}


def _status_bytes(path: Path, field: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * KIB
    raise RuntimeError(f"{path} has no {field}: the process ended")


class Mounter:
    """Mounts and unmounts by the control socket, as fast as the daemon does it."""

    def __init__(self, product: Product) -> None:
        product.do("daemon", "start")
        self._target = product.base / "view"
        self._target.mkdir(exist_ok=True)
        self._client = ControlClient(Paths(product.root, product.run).control_socket)

    def close(self) -> None:
        self._client.close()

    @contextlib.contextmanager
    def mounted(self, image: str) -> Iterator[Path]:
        mounted, view = self._client.mount(control.Mount(image=image))
        try:
            syscalls.move_mount(view, self._target)
        finally:
            os.close(view)
        mount_id = mounted.mount.id
        placed = control.Placed(id=mount_id, target=str(self._target), pid=os.getpid())
        self._client.ask(placed, control.Done)
        try:
            yield self._target
        finally:
            syscalls.umount(self._target, syscalls.MNT_DETACH)
            self._client.ask(control.Unmounted(id=mount_id), control.Done)


def write_small_files(layout: Path, tag: str, count: int) -> str:
    """An image of ``count`` files of different contents; its reference."""
    entries = []
    for number in range(count):
        if number % _FILES_PER_DIRECTORY == 0:
            entries.append(directory(f"d{number // _FILES_PER_DIRECTORY}"))
        body = b"%s %d\n" % (tag.encode(), number)
        entries.append(file(f"d{number // _FILES_PER_DIRECTORY}/f{number}", body))
    write_layout(layout, {tag: Image([Layer(entries)])})
    return f"oci:{layout}:{tag}"


def mounts(product: Product, image: str, count: int, *, warm_up: int) -> Memory:
    """Growth over ``count`` mounts, each of which opens a file and writes one."""
    mounter = Mounter(product)
    before: Memory = {}
    try:
        for number in range(warm_up + count):
            if number == warm_up:
                before = measure(product)
            with mounter.mounted(image) as view:
                (view / "d0/f0").read_bytes()
                (view / "new").write_bytes(b"x")
        return growth(before, measure(product))
    finally:
        mounter.close()


def faults(product: Product, image: str, count: int, *, warm_up: int) -> Memory:
    """Growth over ``count`` first opens of files that have to be fetched."""
    mounter = Mounter(product)
    before: Memory = {}
    try:
        with mounter.mounted(image) as view:
            for number in range(warm_up + count):
                if number == warm_up:
                    before = measure(product)
                path = view / f"d{number // _FILES_PER_DIRECTORY}/f{number}"
                if not path.read_bytes().endswith(b" %d\n" % number):
                    raise RuntimeError(f"{path} has another content")
            return growth(before, measure(product))
    finally:
        mounter.close()


def images(product: Product, base: Path, count: int) -> Memory:
    """Growth for each further image of 2,000 files that is pulled and mounted."""
    references = [write_small_files(base / f"i{n}", f"i{n}", 2000) for n in range(count + 3)]
    with contextlib.ExitStack() as stack:
        mounter = Mounter(product)
        stack.callback(mounter.close)
        before: Memory = {}
        for number, reference in enumerate(references):
            if number == 3:
                before = measure(product)
            place = product.mount(reference, f"image-{number}", "--read-only")
            stack.callback(product.do, "umount", place)
        total = growth(before, measure(product))
    return {name: bytes_ // count for name, bytes_ in total.items()}


def write_large_layer(layout: Path, size: int) -> str:
    """An image of one uncompressed layer of ``size`` bytes in files of 1 to 16 MiB."""
    blobs = layout / "blobs/sha256"
    blobs.mkdir(parents=True)
    source, digest = random.Random(1), hashlib.sha256()
    draft = layout / "draft"
    with draft.open("wb") as raw, tarfile.open(fileobj=raw, mode="w|") as tar:
        written = 0
        while written < size:
            info = tarfile.TarInfo(f"f{written}")
            info.size = min(source.choice((1, 2, 16)) * MIB, size - written)
            tar.addfile(info, BytesIO(source.randbytes(info.size)))
            written += info.size
    with draft.open("rb") as raw:
        while piece := raw.read(MIB):
            digest.update(piece)
    layer = {"mediaType": "application/vnd.oci.image.layer.v1.tar", "size": draft.stat().st_size}
    layer["digest"] = f"sha256:{digest.hexdigest()}"
    draft.rename(blobs / digest.hexdigest())
    rootfs = {"type": "layers", "diff_ids": [layer["digest"]]}
    config = {"architecture": "amd64", "os": "linux", "rootfs": rootfs}
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": _put(blobs, config, "application/vnd.oci.image.config.v1+json"),
        "layers": [layer],
    }
    entry = _put(blobs, manifest, "application/vnd.oci.image.manifest.v1+json")
    entry["annotations"] = {"org.opencontainers.image.ref.name": "large"}
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return f"oci:{layout}:large"


def _put(blobs: Path, document: object, media_type: str) -> dict[str, object]:
    raw = json.dumps(document).encode()
    digest = hashlib.sha256(raw).hexdigest()
    (blobs / digest).write_bytes(raw)
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(raw)}


_IMPORT = """
import pathlib, sys
from cache_server.cli import main
peak = pathlib.Path(sys.argv.pop(1))
try:
    main()
finally:
    peak.write_text(pathlib.Path("/proc/self/status").read_text())
"""


def import_peak(base: Path, size: int) -> int:
    """The most memory, in bytes, that importing a layer of ``size`` bytes took (its peak RSS).

    The process tells it itself: wait4's maximum also has what its parent had before the exec.
    """
    reference = write_large_layer(base / "large", size)
    words = ["import", reference, "--root", str(base / "server"), "--platform", "linux/amd64"]
    subprocess.run(
        [sys.executable, "-c", _IMPORT, str(base / "status"), *words],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        check=True,
    )
    return _status_bytes(base / "status", "VmHWM")


def _with_product(use: Callable[[Product], Memory]) -> Memory:
    product = Product({"companions_bytes": 0})
    try:
        return use(product)
    finally:
        product.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mounts", type=int, default=1000)
    parser.add_argument("--faults", type=int, default=100_000)
    parser.add_argument("--images", type=int, default=30)
    parser.add_argument("--import-mib", type=int, default=2048)
    options = parser.parse_args()
    facts = machine.describe()
    print(", ".join(f"{name} {facts[name]}" for name in ("kernel", "python", "processors")))
    print("\n| what | daemon | keeper | store | cache-server |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="lazy-memory-", dir="/tmp") as made:
        base = Path(made)
        few = write_small_files(base / "few", "few", 100)
        many = write_small_files(base / "many", "many", options.faults + 2000)

        def use(product: Product) -> Memory:
            _print_row("after the first mount", _first(product, few))
            grown = mounts(product, few, options.mounts, warm_up=100)
            _print_row(f"growth over {options.mounts:,} mounts and unmounts", grown)
            grown = faults(product, many, options.faults, warm_up=2000)
            _print_row(f"growth over {options.faults:,} faults", grown)
            _print_row(
                "growth for each further mounted image", images(product, base, options.images)
            )
            return measure(product)

        _print_row("at the end", _with_product(use))
        peak = import_peak(base, options.import_mib * MIB)
        print(f"\nimport of a layer of {options.import_mib} MiB: at most {peak / MIB:.0f} MiB")


def _first(product: Product, image: str) -> Memory:
    mounter = Mounter(product)
    with mounter.mounted(image) as view:
        (view / "d0/f1").read_bytes()
        memory = measure(product)
    mounter.close()
    return memory


def _print_row(what: str, memory: Memory) -> None:
    names = ("daemon", "keeper", "store", "cache-server")
    cells = (f"{memory[name] / MIB:.2f} MiB" for name in names)
    print(f"| {what} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
