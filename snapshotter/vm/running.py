"""Runs a command of an image in a guest: back ends, disks, initramfs, QEMU, and all gone after it.

Plain, the guest's root is a virtio-fs share whose names and contents a back end serves. With guest
assist the guest's kernel has the names itself, from the metadata image as a disk, and composes
EROFS and overlayfs; the back end serves contents alone, by their names.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snapshotter.errors import InvalidInputError, UnavailableError, UnsupportedError
from snapshotter.paths import Paths
from snapshotter.service.images import metadata_name
from snapshotter.service.sandbox_spec import Plan, Settings, find_program, make_plan
from snapshotter.store.images import ImageRecord
from snapshotter.vm import guest_kernel, initramfs, machines
from snapshotter.vm.back_end import start_back_end
from snapshotter.vm.facts import KERNELS, KVM_VERDICT
from snapshotter.vm.guest import CONSOLE_LOG, Companion, Guest, GuestSilentError, new_end_mark
from snapshotter.vm.guest_kernel import GuestKernel
from snapshotter.vm.machines import AcceleratorChoice, MachineChoice
from snapshotter.vm.private_directory import private_directory
from snapshotter.vm.qemu import Disk, GuestParts, Machine, MachineKind

_SILENCE_WITH_KVM_S = 5.0
"""A kernel under KVM has started our init by then, or never will."""

_SILENCE_EMULATED_S = 120.0
_BASE_MODULES = ("virtiofs", "virtio_console")
_ASSIST_MODULES = ("virtio_blk", "erofs", "overlay")
_ASSIST_OPTIONS = "metacopy=on,redirect_dir=on"
"""As on the host: docs/decisions/0004."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestOptions:
    """How a guest is made. None and ``auto`` leave a thing to what is here.

    ``upper`` is a directory of the host (plain), ``upper_disk`` a file with an ext4 file system
    (assisted; made, of ``upper_disk_mib``, when it is not there). ``console_log`` is where a copy
    of the guest's kernel messages goes.
    """

    kernel: Path | None = None
    kernel_modules: Path | None = None
    initrd: Path | None = None
    memory_mib: int = 1024
    processors: int = 1
    accelerator: AcceleratorChoice = "auto"
    machine: MachineChoice = "auto"
    assist: bool = False
    read_only: bool = False
    upper: Path | None = None
    upper_disk: Path | None = None
    upper_disk_mib: int = 4096
    console_log: Path | None = None


def check(options: GuestOptions) -> None:
    """Raises InvalidInputError for options that contradict one another."""
    if options.assist and options.upper is not None:
        raise InvalidInputError(
            "--guest-assist and --upper: the guest keeps what it writes in its memory, "
            "or on a disk: --upper-disk FILE"
        )
    if options.upper_disk is not None and not options.assist:
        raise InvalidInputError("--upper-disk is for --guest-assist; without it use --upper DIR")
    if options.read_only and (options.upper or options.upper_disk):
        raise InvalidInputError("an upper and read-only: choose one")
    if options.memory_mib < 128 or options.processors < 1:
        raise InvalidInputError("a guest needs 128 MiB and one processor at least")


def run(
    paths: Paths,
    reference: str,
    image: ImageRecord,
    settings: Settings,
    options: GuestOptions,
) -> int:
    """Runs one command; its exit status (128+n for signal n).

    ``image`` is known as ``reference``; ``check`` was called before. Raises SandboxError when the
    guest could not run it, and what finding a kernel, QEMU and a plan raises.
    """
    state = paths.guests
    terminal = os.environ.get("TERM", "xterm") if os.isatty(0) and os.isatty(1) else None
    plan = make_plan(settings, image.prepared, host_name="guest", terminal=terminal)
    program = machines.qemu()
    kind = machines.machine_kind(program, options.machine)
    kernel = _kernel(options, state)
    base = _initramfs(options, kernel, kind, state)
    verdict = state / KVM_VERDICT
    tries = machines.accelerators(options.accelerator, verdict)
    for accelerator in tries:
        machine = machines.machine(program, kind, accelerator)
        silence_s = _SILENCE_WITH_KVM_S if accelerator == "kvm" else _SILENCE_EMULATED_S
        with ExitStack() as stack:
            directory = stack.enter_context(_directory(paths, options))
            guest = _make(
                _Wanted(paths, reference, image, plan, options, terminal),
                machine,
                kernel,
                base,
                directory,
                stack,
            )
            try:
                return guest.run(silence_s=silence_s)
            except GuestSilentError as error:
                if accelerator == tries[-1]:
                    raise
                machines.remember_kvm_trouble(verdict, str(error).partition("\n")[0])
    raise AssertionError("there is always something to try")


def initramfs_for(paths: Paths, options: GuestOptions) -> bytes:
    """What guests with these options start with, without what belongs to one run."""
    state = paths.guests
    kind = machines.machine_kind(machines.qemu(), options.machine)
    return _initramfs(options, _kernel(options, state), kind, state)


@dataclass(frozen=True, slots=True)
class _Wanted:
    paths: Paths
    reference: str
    image: ImageRecord
    plan: Plan
    options: GuestOptions
    terminal: str | None


def _make(
    wanted: _Wanted,
    machine: Machine,
    kernel: GuestKernel,
    base: bytes,
    directory: Path,
    stack: ExitStack,
) -> Guest:
    """A guest that is ready to be run; its back end runs until ``stack`` ends."""
    options, mark = wanted.options, new_end_mark()
    if options.assist:
        back_end, parts = _assisted(wanted, directory, stack)
    else:
        back_end, parts = _plain(wanted, directory, stack)
    settings = initramfs.GuestSettings(
        view="assist" if options.assist else "plain",
        options=_mount_options(options),
        hostname=wanted.plan.environment["HOSTNAME"],
        end_mark=mark,
        upper="disk" if options.upper_disk is not None else "memory",
        terminal=None if wanted.terminal is None else _terminal_settings(),
    )
    initrd = directory / "initrd"
    initrd.write_bytes(base + initramfs.run_archive(settings, _command(wanted.plan)))
    return Guest(
        machine,
        GuestParts(
            kernel=str(kernel.image.absolute()),
            initrd=initrd.name,
            memory_mib=options.memory_mib,
            processors=options.processors,
            console_log=CONSOLE_LOG,
            has_terminal=wanted.terminal is not None,
            **parts,
        ),
        directory=directory,
        end_mark=mark,
        companions=[back_end],
    )


def _kernel(options: GuestOptions, state: Path) -> GuestKernel:
    if options.kernel is not None:
        found = guest_kernel.named(options.kernel, options.kernel_modules)
    else:
        found = guest_kernel.find(state / KERNELS)
    needed = guest_kernel.DATA_ONLY_LAYERS
    if options.assist and (0, 0) < found.version < needed:
        raise UnsupportedError(
            f"guest assist: kernel {found.release} has no data-only layers in overlayfs "
            f"({needed[0]}.{needed[1]} has); run without --guest-assist, or: snapshotter vm setup"
        )
    return found


def modules_for(kind: MachineKind, *, assist: bool) -> list[str]:
    """The modules that a guest needs, if its kernel has not got them built in."""
    bus = ["virtio_mmio"] if kind == "microvm" else ["virtio_pci"]
    return [*bus, *_BASE_MODULES, *(_ASSIST_MODULES if assist else ())]


def _initramfs(options: GuestOptions, kernel: GuestKernel, kind: MachineKind, state: Path) -> bytes:
    if options.initrd is not None:
        return options.initrd.read_bytes()
    wanted = modules_for(kind, assist=options.assist)
    return guest_kernel.initramfs_of(kernel, wanted, state / "initramfs")


def _plain(wanted: _Wanted, directory: Path, stack: ExitStack) -> tuple[Companion, dict[str, Any]]:
    options = wanted.options
    words = [wanted.reference, "--socket", str(directory / "image.sock")]
    if options.read_only:
        words.append("--read-only")
    else:
        upper = options.upper or stack.enter_context(_throw_away_upper(wanted.paths))
        words += ["--upper", str(upper)]
    back_end = stack.enter_context(start_back_end(wanted.paths, words, directory / "image.sock"))
    return back_end, {"file_systems": {"image": "image.sock"}}


def _assisted(
    wanted: _Wanted, directory: Path, stack: ExitStack
) -> tuple[Companion, dict[str, Any]]:
    name = metadata_name(wanted.image.prepared)
    disks = [Disk(str(wanted.paths.objects / name.path), read_only=True)]
    if wanted.options.upper_disk is not None:
        disk = wanted.options.upper_disk.absolute()
        _make_disk(disk, wanted.options.upper_disk_mib)
        disks.append(Disk(str(disk), read_only=False))
    socket = directory / "contents.sock"
    words = [wanted.reference, "--socket", str(socket), "--contents"]
    back_end = stack.enter_context(start_back_end(wanted.paths, words, socket))
    return back_end, {"file_systems": {"contents": socket.name}, "disks": disks}


def _mount_options(options: GuestOptions) -> str:
    if options.assist:
        return _ASSIST_OPTIONS
    return "ro" if options.read_only else "rw"


def _command(plan: Plan) -> initramfs.GuestCommand:
    name, *arguments = plan.arguments
    return initramfs.GuestCommand(
        name=name,
        programs=find_program(name, plan.environment["PATH"]),
        arguments=arguments,
        environment=plan.environment,
        user=plan.user,
        workdir=plan.workdir,
    )


def _terminal_settings() -> str:
    columns, lines = os.get_terminal_size(0)
    return f"rows {lines} cols {columns}" if lines and columns else "sane"


@contextmanager
def _directory(paths: Paths, options: GuestOptions) -> Iterator[Path]:
    """A private directory for sockets and logs, gone afterwards."""
    with private_directory(paths.run, "vm-") as directory:
        try:
            yield directory
        finally:
            if options.console_log is not None and (directory / CONSOLE_LOG).exists():
                shutil.copyfile(directory / CONSOLE_LOG, options.console_log)


def _throw_away_upper(paths: Paths) -> AbstractContextManager[Path]:
    """An upper on the root's own disk: a run directory is often in memory."""
    return private_directory(paths.guests / "uppers", "upper-")


def _make_disk(path: Path, size_mib: int) -> None:
    """An empty, sparse ext4 file system at ``path``, if nothing is there yet."""
    if path.exists():
        return
    program = shutil.which("mkfs.ext4", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if program is None:
        raise UnsupportedError(
            "--upper-disk: mkfs.ext4 is not on this host: apt-get install e2fsprogs"
        )
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("xb") as file:
        file.truncate(size_mib << 20)
    done = subprocess.run(
        [program, "-q", "-F", temporary], capture_output=True, text=True, check=False
    )
    if done.returncode:
        temporary.unlink()
        raise UnavailableError(f"--upper-disk {path}: {done.stderr.strip()}")
    temporary.rename(path)
