"""The modules of a guest's kernel: which are needed, in the order in which they can be loaded.

A kernel package has ``modules.builtin`` but no ``modules.dep`` (depmod makes that at installation),
so what a module depends on is read from the module itself: its ELF section ``.modinfo`` holds
NUL-terminated ``key=value`` strings, ``depends`` among them (Linux, scripts/mod/modpost.c).
"""

from __future__ import annotations

import lzma
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import zstandard

from snapshotter.errors import InvalidInputError, NotFoundError

_DEPENDS = re.compile(rb"(?:^|\0)depends=([A-Za-z0-9_,-]*)\0")
_FILE_NAME = re.compile(r"(?P<name>.+)\.ko(?P<compression>\.xz|\.zst)?")
_LARGEST = 64 << 20
"""No module is larger; what claims to be is not unpacked."""


class Module(NamedTuple):
    """A module's name (with ``_``, as the kernel has it) and its bytes, not compressed."""

    name: str
    data: bytes


class KernelModules:
    """The modules below ``directory``, a ``lib/modules/RELEASE``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files = dict(_module_files(directory))
        self._builtin = frozenset(_builtin_names(directory / "modules.builtin"))

    def closure(self, names: Iterable[str]) -> list[Module]:
        """``names`` and all that they need, each after what it needs; built-in ones left out.

        Raises NotFoundError for a module that the kernel does not have.
        """
        found: dict[str, Module] = {}
        for name in names:
            self._add(name, found, ())
        return list(found.values())

    def _add(self, name: str, found: dict[str, Module], above: tuple[str, ...]) -> None:
        if name in self._builtin or name in found:
            return
        if name in above:
            raise InvalidInputError(f"kernel modules in {self._directory}: {name} needs itself")
        path = self._files.get(name)
        if path is None:
            raise NotFoundError(
                f"kernel module {name} is not in {self._directory}; "
                "use a kernel that has it, or its Debian cloud kernel"
            )
        data = _read(path)
        for needed in _depends(data):
            self._add(needed, found, (*above, name))
        found[name] = Module(name, data)


def _module_files(directory: Path) -> Iterator[tuple[str, Path]]:
    for path in directory.glob("**/*.ko*"):
        match = _FILE_NAME.fullmatch(path.name)
        if match:
            yield _as_kernel_names(match["name"]), path


def _builtin_names(path: Path) -> Iterator[str]:
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        yield _as_kernel_names(Path(line).name.removesuffix(".ko"))


def _as_kernel_names(name: str) -> str:
    return name.replace("-", "_")


def _read(path: Path) -> bytes:
    packed = path.read_bytes()
    try:
        if path.suffix == ".xz":
            return lzma.LZMADecompressor().decompress(packed, _LARGEST)
        if path.suffix == ".zst":
            return zstandard.ZstdDecompressor().decompress(packed, max_output_size=_LARGEST)
    except (lzma.LZMAError, zstandard.ZstdError) as error:
        raise InvalidInputError(f"kernel module {path} cannot be unpacked: {error}") from error
    return packed


def _depends(data: bytes) -> list[str]:
    match = _DEPENDS.search(data)
    text = match[1].decode() if match else ""
    return [_as_kernel_names(name) for name in text.split(",") if name]
