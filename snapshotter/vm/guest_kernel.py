"""Which kernel a guest runs: one that was named, one that was fetched, or one of the host's."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from snapshotter.errors import NotFoundError, UnsupportedError
from snapshotter.vm.initramfs import base_archive
from snapshotter.vm.kernel_modules import KernelModules

_HOST_KERNELS = Path("/boot")
_HOST_MODULES = Path("/lib/modules")
_VERSION = re.compile(r"(\d+)\.(\d+)")

DATA_ONLY_LAYERS = (6, 5)
"""The Linux whose overlayfs has data-only layers (``::``): what guest assist needs."""


@dataclass(frozen=True, slots=True)
class GuestKernel:
    """A kernel image and its modules' directory; None: all that is needed is built in."""

    image: Path
    modules: Path | None
    release: str

    @property
    def version(self) -> tuple[int, int]:
        """Major and minor, (0, 0) if the release does not begin with them."""
        match = _VERSION.match(self.release)
        return (int(match[1]), int(match[2])) if match else (0, 0)


def named(image: Path, modules: Path | None) -> GuestKernel:
    """The kernel that the user named. Raises NotFoundError for files that are not there."""
    if not image.is_file():
        raise NotFoundError(f"kernel {image} does not exist")
    if modules is not None and not modules.is_dir():
        raise NotFoundError(f"kernel modules {modules} is no directory")
    release = modules.name if modules is not None else image.name.partition("-")[2]
    return GuestKernel(image, modules, release or image.name)


def find(kernels: Path, *, host: bool = True) -> GuestKernel:
    """The newest kernel below ``kernels``, or else of the host's Debian cloud kernels.

    Raises NotFoundError that says how to get one.
    """
    fetched = sorted(_fetched(kernels), key=_age)
    if fetched:
        return fetched[-1]
    of_host = sorted(_of_host(), key=_age) if host else []
    if of_host:
        return of_host[-1]
    raise NotFoundError(
        "there is no guest kernel here; fetch Debian's by: snapshotter vm setup, "
        "or name one by --kernel and --kernel-modules"
    )


def initramfs_of(kernel: GuestKernel, wanted: Sequence[str], cache: Path) -> bytes:
    """The base archive with the modules ``wanted``, from ``cache`` if it was made before.

    Raises UnsupportedError without a static busybox, NotFoundError for a missing module.
    """
    program = busybox()
    key = hashlib.sha256(repr((_stamp(program), str(kernel.image), wanted)).encode())
    for name in ("guest_init.sh", "guest_inside.sh", "initramfs.py"):
        key.update(Path(__file__).with_name(name).read_bytes())
    path = cache / f"initramfs-{key.hexdigest()[:16]}.img"
    try:
        return path.read_bytes()
    except FileNotFoundError:
        pass
    modules = KernelModules(kernel.modules).closure(wanted) if kernel.modules else []
    archive = base_archive(program.read_bytes(), modules)
    cache.mkdir(parents=True, exist_ok=True)
    temporary = cache / f".{path.name}.{os.getpid()}"
    temporary.write_bytes(archive)
    temporary.rename(path)
    return archive


def busybox() -> Path:
    """The host's busybox, which must need no library. Raises UnsupportedError without one."""
    found = shutil.which("busybox")
    if found is None:
        raise UnsupportedError(
            "guests are started by a static busybox and this host has none: "
            "apt-get install busybox-static"
        )
    path = Path(found)
    if b"/ld-linux" in path.read_bytes()[:4096] or b"/ld-musl" in path.read_bytes()[:4096]:
        raise UnsupportedError(
            f"{path} needs libraries that a guest does not have: apt-get install busybox-static"
        )
    return path


def _stamp(path: Path) -> tuple[str, int, int]:
    status = path.stat()
    return str(path), status.st_size, status.st_mtime_ns


def _fetched(kernels: Path) -> Iterator[GuestKernel]:
    for image in kernels.glob("*/vmlinuz"):
        yield GuestKernel(image, image.parent / "modules", image.parent.name)


def _of_host() -> Iterator[GuestKernel]:
    for image in _HOST_KERNELS.glob("vmlinuz-*cloud-amd64"):
        release = image.name.removeprefix("vmlinuz-")
        modules = _HOST_MODULES / release
        if modules.is_dir() and os.access(image, os.R_OK):
            yield GuestKernel(image, modules, release)


def _age(kernel: GuestKernel) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", kernel.release)]
