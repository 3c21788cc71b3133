"""A real Debian root file system with Python, as an OCI layout; built once and kept in .cache/.

The cache is keyed by the recipe, so a changed recipe builds anew. Building takes about a minute
and reads the Debian archive; afterwards everything is local.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.images import Image, Layer, write_layout

_RECIPE = ("mmdebstrap", "--variant=minbase", "--include=python3", "--format=tar", "bookworm")
_TAG = "bookworm"
_CACHE = Path(__file__).resolve().parents[2] / ".cache"
_BUILD_TIMEOUT_S = 900


@dataclass(frozen=True, slots=True)
class LocalImage:
    """An image in an OCI layout."""

    layout: Path
    tag: str

    @property
    def reference(self) -> str:
        """How the product is told of it."""
        return f"oci:{self.layout}:{self.tag}"


def required_tool(program: str, package: str) -> str:
    """The program's path; a missing one is an error that names the Debian package to install."""
    found = shutil.which(program)
    if found is None:
        raise RuntimeError(f"{program} is missing: apt-get install {package}")
    return found


def debian_image() -> LocalImage:
    """The Debian image; builds it when it is not in the cache yet."""
    key = hashlib.sha256("\0".join(_RECIPE).encode()).hexdigest()[:16]
    directory = _CACHE / f"debian-{key}"
    with _locked(_CACHE / f"debian-{key}.lock"):
        if not (directory / "oci" / "index.json").exists():
            _build(directory)
    return LocalImage(directory / "oci", _TAG)


def unpack_with_umoci(image: LocalImage, bundle: Path) -> Path:
    """Unpacks the image by umoci, which shares no code with us; the path of its root."""
    umoci = required_tool("umoci", "umoci")
    source = f"{image.layout}:{image.tag}"
    subprocess.run(
        [umoci, "unpack", "--image", source, str(bundle)], check=True, capture_output=True
    )
    return bundle / "rootfs"


@pytest.fixture(scope="session")
def debian() -> LocalImage:
    """The Debian image, shared by the session."""
    return debian_image()


def _build(directory: Path) -> None:
    building = directory.with_suffix(".new")
    shutil.rmtree(building, ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)
    building.mkdir(parents=True)
    tar = building / "root.tar"
    mmdebstrap = required_tool(_RECIPE[0], "mmdebstrap")
    subprocess.run(
        [mmdebstrap, *_RECIPE[1:], str(tar)],
        check=True,
        capture_output=True,
        timeout=_BUILD_TIMEOUT_S,
    )
    image = Image([Layer(tar.read_bytes())], env=["PATH=/usr/sbin:/usr/bin:/sbin:/bin"])
    write_layout(building / "oci", {_TAG: image})
    tar.unlink()
    os.replace(building, directory)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
