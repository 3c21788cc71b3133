"""Architectures by Go's names, as image indexes have them: ``amd64``, ``arm64``, ``arm/v7``."""

from __future__ import annotations

import os
import re

from snapshotter.errors import InvalidInputError, UnsupportedError

_BY_MACHINE = {
    "x86_64": "amd64",
    "aarch64": "arm64",
    "armv7l": "arm/v7",
    "armv6l": "arm/v6",
    "i686": "386",
    "loongarch64": "loong64",
}
_PART = re.compile(r"[a-z0-9]{1,32}")
_SYSTEMS = frozenset(("linux", "windows", "darwin", "freebsd", "wasip1", "js"))


def host_architecture() -> str:
    """This machine's architecture."""
    machine = os.uname().machine
    return _BY_MACHINE.get(machine, machine)


def parse_platform(text: str) -> str:
    """The architecture, perhaps with ``/variant``, of ``[linux/]ARCH[/VARIANT]``.

    Raises UnsupportedError for another system than linux, InvalidInputError for anything else.
    """
    parts = text.split("/")
    if parts[0] in _SYSTEMS:
        system = parts.pop(0)
        if system != "linux":
            raise UnsupportedError(f"platform {text!r}: images for linux alone can be used here")
    if not 1 <= len(parts) <= 2 or not all(_PART.fullmatch(part) for part in parts):
        raise InvalidInputError(
            f"platform {text[:80]!r}: write linux/ARCH or linux/ARCH/VARIANT, such as linux/arm64"
        )
    return "/".join(parts)
