"""What containerd must be told to use us, and whether it has been."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import tomllib
from pathlib import Path

from snapshotter.errors import InvalidInputError, UnsupportedError
from snapshotter.platforms import host_architecture
from snapshotter.service.control import Fact

CONTAINERD_CONFIG = Path("/etc/containerd/config.toml")
_VERSION = re.compile(r"\bv?(\d+)\.(\d+)(?:[.\-~+]|\b)")
_TIMEOUT_S = 10.0
Version = tuple[int, int]

_HEAD = """\
# For containerd {major}.{minor}: merge this into {file}, then restart containerd.
version = {schema}

[proxy_plugins.{name}]
  type = "snapshot"
  address = {socket}
"""
_EXPORTS = """\
  platform = "linux/{architecture}"
  [proxy_plugins.{name}.exports]
    root = {state}
    enable_remote_snapshot_annotations = "true"
"""
_CRI_1 = """
# Kubernetes (CRI) pulls through it; the annotations tell it which layer of which image is wanted.
[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = "{name}"
  disable_snapshot_annotations = false
"""
_CRI_2 = """
# Kubernetes (CRI) pulls through it; the annotations tell it which layer of which image is wanted.
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "{name}"
  disable_snapshot_annotations = false

# ctr and nerdctl unpack with it. The list replaces the default one, so overlayfs is in it, too.
[[plugins."io.containerd.transfer.v1.local".unpack_config]]
  platform = "linux/{architecture}"
  snapshotter = "{name}"
[[plugins."io.containerd.transfer.v1.local".unpack_config]]
  platform = "linux/{architecture}"
  snapshotter = "overlayfs"
"""


def parse_version(text: str) -> Version:
    """Major and minor number in what ``containerd --version`` says; InvalidInputError without."""
    match = _VERSION.search(text)
    if match is None:
        raise InvalidInputError(f"containerd's version: {text.strip()[:100]!r} names none")
    return int(match[1]), int(match[2])


def installed_version() -> Version | None:
    """The version of the containerd on the PATH, None without one.

    Raises UnsupportedError when it does not tell.
    """
    program = shutil.which("containerd")
    if program is None:
        return None
    try:
        said = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
        return parse_version(said.stdout)
    except (OSError, subprocess.SubprocessError, InvalidInputError) as error:
        raise UnsupportedError(
            f"ask {program} for its version: {error}; give it with --for"
        ) from error


def fragment(version: Version, *, name: str, service_socket: Path, state: Path) -> str:
    """What to add to containerd's config.toml for this snapshotter to be its ``name``."""
    if version < (1, 6):
        raise UnsupportedError(
            f"containerd {version[0]}.{version[1]}: 1.6 or later is needed for lazy pulls"
        )
    parts = [_HEAD]
    if version >= (1, 7):
        parts.append(_EXPORTS)
    parts.append(_CRI_1 if version < (2, 0) else _CRI_2)
    return "".join(parts).format(
        major=version[0],
        minor=version[1],
        schema=2 if version < (2, 0) else 3,
        file=CONTAINERD_CONFIG,
        name=name,
        socket=_quoted(service_socket),
        state=_quoted(state),
        architecture=host_architecture(),
    )


def diagnose(service_socket: Path, config: Path = CONTAINERD_CONFIG) -> list[Fact]:
    """What of the way from containerd to us is there. Without a containerd that is all it says."""
    try:
        version = installed_version()
    except UnsupportedError as error:
        return [Fact(name="containerd", ok=False, detail=str(error))]
    if version is None:
        return [Fact(name="containerd", ok=True, detail="not installed: nothing to set up")]
    is_new_enough = version >= (1, 6)
    return [
        Fact(
            name="containerd",
            ok=is_new_enough,
            detail=f"version {version[0]}.{version[1]}",
            remedy="" if is_new_enough else "1.6 or later is needed for lazy pulls",
        ),
        _library(),
        _service(service_socket),
        _config(config, service_socket),
    ]


def _library() -> Fact:
    ok = importlib.util.find_spec("grpc") is not None
    return Fact(
        name="grpcio",
        ok=ok,
        detail="installed" if ok else "not installed",
        remedy="" if ok else "pip install 'lazy-snapshotter[containerd]'",
    )


def _service(path: Path) -> Fact:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_TIMEOUT_S)
        try:
            probe.connect(os.fspath(path))
        except OSError as error:
            remedy = "snapshotter containerd serve, or the unit snapshotter-containerd.service"
            detail = f"{path}: {error.strerror}"
            return Fact(name="service", ok=False, detail=detail, remedy=remedy)
    return Fact(name="service", ok=True, detail=f"answers on {path}")


def _config(path: Path, service_socket: Path) -> Fact:
    remedy = f"merge what `snapshotter containerd config` prints into {path}"
    try:
        settings = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        return Fact(name="configuration", ok=False, detail=f"{path}: {error}", remedy=remedy)
    plugins = settings.get("proxy_plugins", {})
    names = [
        name
        for name, plugin in plugins.items()
        if isinstance(plugin, dict) and plugin.get("address") == str(service_socket)
    ]
    if not names:
        detail = f"{path}: no proxy plugin has the address {service_socket}"
        return Fact(name="configuration", ok=False, detail=detail, remedy=remedy)
    detail = f"the snapshotter {names[0]!r} of {path} is this one"
    return Fact(name="configuration", ok=True, detail=detail)


def _quoted(path: Path) -> str:
    """A TOML string; paths may hold what TOML escapes."""
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
