"""Fetches Debian's cloud kernel by apt, in an apt state of its own: nothing is installed.

The package is looked up in ``SUITE`` whatever the host's release is; its signature is checked by
apt with Debian's archive keyring, as always.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from snapshotter.errors import UnavailableError, UnsupportedError

SUITE = "trixie"
"""Debian 13: Linux 6.12, which composes data-only layers (overlayfs, 6.5) by itself."""

_META_PACKAGE = "linux-image-cloud-amd64"
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_MIRROR = "http://deb.debian.org/debian"
_FETCH_TIMEOUT_S = 600


def fetch(directory: Path, *, mirror: str = _MIRROR) -> Path:
    """Puts the kernel into ``directory/RELEASE`` (``vmlinuz`` and ``modules/``); that path.

    What is there already stays. Raises UnsupportedError without apt and dpkg, UnavailableError
    with apt's own words when the package cannot be had; then nothing is left behind.
    """
    for program in ("apt-get", "apt-cache", "dpkg-deb"):
        if shutil.which(program) is None:
            raise UnsupportedError(
                f"fetch a guest kernel: {program} is not on this host; "
                "give a kernel by --kernel and its modules by --kernel-modules"
            )
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".fetch-") as temporary:
        work = Path(temporary)
        environment = _private_state(work, mirror)
        _run(["apt-get", "update", "-qq"], environment, work)
        package = _newest(environment, work)
        release = package.removeprefix("linux-image-")
        target = directory / release
        if target.exists():
            return target
        _run(["apt-get", "download", "-qq", package], environment, work)
        archive = next(work.glob("*.deb"))
        _run(["dpkg-deb", "-x", str(archive), str(work / "tree")], environment, work)
        _arrange(work / "tree", release, work / "kernel")
        (work / "kernel").rename(target)
    return target


def _private_state(work: Path, mirror: str) -> Mapping[str, str]:
    """An apt that has nothing of the host's but its keyring; the environment that selects it."""
    for name in ("sources", "state", "lists/partial", "cache/archives/partial"):
        (work / name).mkdir(parents=True)
    (work / "status").touch()
    (work / "sources/debian.sources").write_text(
        f"Types: deb\nURIs: {mirror}\nSuites: {SUITE}\nComponents: main\nSigned-By: {_KEYRING}\n"
    )
    settings = {
        "Dir::Etc::sourcelist": os.devnull,
        "Dir::Etc::sourceparts": work / "sources",
        "Dir::State": work / "state",
        "Dir::State::lists": work / "lists",
        "Dir::State::status": work / "status",
        "Dir::Cache": work / "cache",
        "APT::Sandbox::User": "root",
        "APT::Architecture": "amd64",
    }
    text = "".join(f'{name} "{value}";\n' for name, value in settings.items())
    (work / "apt.conf").write_text(text)
    return {**os.environ, "APT_CONFIG": str(work / "apt.conf"), "LC_ALL": "C"}


def _newest(environment: Mapping[str, str], work: Path) -> str:
    """The package that the meta package depends on."""
    text = _run(["apt-cache", "depends", _META_PACKAGE], environment, work)
    for line in text.splitlines():
        word = line.strip().removeprefix("Depends: ")
        if word.startswith("linux-image-") and word != line.strip():
            return word
    raise UnavailableError(f"fetch a guest kernel: {_META_PACKAGE} is not in Debian {SUITE}")


def _arrange(tree: Path, release: str, target: Path) -> None:
    target.mkdir()
    (tree / "boot" / f"vmlinuz-{release}").rename(target / "vmlinuz")
    for base in ("usr/lib/modules", "lib/modules"):
        if (tree / base / release).is_dir():
            (tree / base / release).rename(target / "modules")
            return
    raise UnavailableError(f"fetch a guest kernel: the package of {release} has no modules")


def _run(words: Sequence[str], environment: Mapping[str, str], work: Path) -> str:
    try:
        done = subprocess.run(
            words,
            env=environment,
            cwd=work,
            capture_output=True,
            text=True,
            timeout=_FETCH_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"fetch a guest kernel: {' '.join(words)} takes too long") from error
    if done.returncode != 0:
        raise UnavailableError(
            f"fetch a guest kernel: {' '.join(words)} failed: {done.stderr.strip()[-500:]}"
        )
    return done.stdout
