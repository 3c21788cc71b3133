"""A guest's initramfs: busybox, the modules it lacks, our init, and what one run is to do.

The first part is the same for every run with one kernel; the second, small, is a run's own. Linux
unpacks cpio archives that follow one another over one another.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from snapshotter.vm import cpio
from snapshotter.vm.kernel_modules import Module

_DIRECTORIES = ("bin", "dev", "modules", "proc", "sys")


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestSettings:
    """What the init does before it starts the command.

    ``view`` is ``plain`` (the share ``image`` is the root) or ``assist`` (EROFS and overlayfs in
    the guest), ``options`` those of the image's mount. ``upper`` (assist only) is ``memory``
    or ``disk``. ``terminal`` is what ``stty`` is told, None without a terminal; without
    one the output ports end with ``end_mark``.
    """

    view: str
    options: str
    hostname: str
    end_mark: str
    upper: str = "memory"
    terminal: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestCommand:
    """The command: ``programs`` are where it may be, in order; ``name`` is what was asked for."""

    name: str
    programs: Sequence[str]
    arguments: Sequence[str]
    environment: Mapping[str, str]
    user: str
    workdir: str


def base_archive(busybox: bytes, modules: Iterable[Module]) -> bytes:
    """The part that is the same for every run; modules in the order in which they are loaded."""
    entries = [cpio.directory(name) for name in _DIRECTORIES]
    entries.append(cpio.regular("bin/busybox", busybox, executable=True))
    entries += [
        cpio.regular(f"modules/{number:02}-{module.name}.ko", module.data)
        for number, module in enumerate(modules)
    ]
    entries.append(cpio.regular("init", _script("guest_init.sh"), executable=True))
    entries.append(cpio.regular("inside", _script("guest_inside.sh")))
    return cpio.encode(entries)


def run_archive(settings: GuestSettings, command: GuestCommand) -> bytes:
    """The part of one run."""
    return cpio.encode(
        [
            cpio.regular("settings", _as_bytes(_settings_text(settings))),
            cpio.regular("command", _as_bytes(_command_text(command))),
        ]
    )


def _script(name: str) -> bytes:
    return resources.files(__package__).joinpath(name).read_bytes()


def _settings_text(settings: GuestSettings) -> str:
    values = {
        "view": settings.view,
        "options": settings.options,
        "upper": settings.upper,
        "hostname": settings.hostname,
        "end_mark": settings.end_mark,
        "terminal": settings.terminal or "",
    }
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())


def _command_text(command: GuestCommand) -> str:
    variables = [f"{name}={value}" for name, value in command.environment.items()]
    return "\n".join(
        [
            f"become {shlex.quote(command.user)}",
            f"enter {shlex.quote(command.workdir)}",
            f"pick {shlex.join([command.name, *command.programs])}",
            f'environment() {{ exec env -i HOME="$HOME" {shlex.join(variables)} "$@"; }}',
            f"start {shlex.join(command.arguments)}",
            "",
        ]
    )


def _as_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
