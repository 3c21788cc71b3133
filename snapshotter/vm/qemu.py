"""QEMU's command line for a guest. Pure: facts in, words out.

Machines: ``microvm`` starts fastest and has its devices on virtio-mmio, ``q35`` is a PC with PCI.
Found by trying, with QEMU 7.2 and Linux 6.1 and 6.12:

* microvm offers *legacy* virtio by default, which the back ends here refuse: force-legacy=false.
* Under software emulation microvm hangs early unless ``tsc_early_khz`` says what the clock does.
* vhost-user needs the guest's memory to be a shared file: memory-backend-memfd.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

MachineKind = Literal["microvm", "q35"]
Accelerator = Literal["kvm", "tcg"]

PORT_PREFIX = "snapshotter."
"""What the names of a guest's virtio-serial ports begin with."""

_KERNEL_OPTIONS = "console=ttyS0 quiet panic=-1 reboot=t"
_EMULATED_KERNEL_OPTIONS = "mitigations=off nokaslr no_timer_check cryptomgr.notests"
"""Emulated, there is nothing to protect from the processor, and self-tests take long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a guest runs on. ``clock_khz`` is that of the host's processor."""

    program: str
    kind: MachineKind
    accelerator: Accelerator
    clock_khz: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestParts:
    """What a guest is made of; paths and sockets as QEMU, in its working directory, finds them.

    ``file_systems`` are virtio-fs tags and the sockets of their back ends; ``disks`` come in the
    order of their names in the guest (vda …). ``ports`` are names and the descriptors of their
    sockets. ``has_terminal`` gives QEMU's own stdin and stdout to the guest's hvc0.
    """

    kernel: str
    initrd: str
    memory_mib: int
    processors: int
    console_log: str
    file_systems: Mapping[str, str] = field(default_factory=dict)
    disks: Sequence[Disk] = ()
    ports: Mapping[str, int] = field(default_factory=dict)
    has_terminal: bool = False
    kernel_options: str = ""


@dataclass(frozen=True, slots=True)
class Disk:
    """A file that the guest sees as a block device."""

    path: str
    read_only: bool


def command_line(machine: Machine, parts: GuestParts) -> list[str]:
    """The words that start the guest."""
    return [
        machine.program,
        *_machine_words(machine),
        *("-m", f"{parts.memory_mib}M", "-smp", str(parts.processors)),
        "-object",
        f"memory-backend-memfd,id=memory,size={parts.memory_mib}M,share=on",
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-kernel", parts.kernel, "-initrd", parts.initrd),
        *("-append", _kernel_options(machine, parts.kernel_options)),
        *("-chardev", f"file,id=log,path={_escaped(parts.console_log)}", "-serial", "chardev:log"),
        *_device_words(machine.kind, parts),
    ]


def device_suffix(kind: MachineKind) -> str:
    """What the names of virtio devices end with on this machine."""
    return "device" if kind == "microvm" else "pci"


def _machine_words(machine: Machine) -> list[str]:
    words = ["-machine", f"{machine.kind},memory-backend=memory"]
    if machine.accelerator == "kvm":
        words += ["-accel", "kvm", "-cpu", "host"]
    else:
        words += ["-accel", "tcg,thread=multi", "-cpu", "qemu64"]
    if machine.kind == "microvm":
        words += ["-global", "virtio-mmio.force-legacy=false"]
    return words


def _kernel_options(machine: Machine, more: str) -> str:
    words = [_KERNEL_OPTIONS]
    if machine.accelerator == "tcg":
        words += [f"tsc_early_khz={machine.clock_khz}", _EMULATED_KERNEL_OPTIONS]
    return " ".join([*words, more]).strip()


def _device_words(kind: MachineKind, parts: GuestParts) -> list[str]:
    suffix = device_suffix(kind)
    words: list[str] = []
    for tag, path in parts.file_systems.items():
        words += ["-chardev", f"socket,id=fs-{tag},path={_escaped(path)}"]
        words += ["-device", f"vhost-user-fs-{suffix},chardev=fs-{tag},tag={tag},queue-size=1024"]
    for number, disk in enumerate(parts.disks):
        words += ["-blockdev", json.dumps(_block_device(f"disk{number}", disk))]
        words += ["-device", f"virtio-blk-{suffix},drive=disk{number}"]
    words += ["-device", f"virtio-serial-{suffix}"]
    for name, descriptor in parts.ports.items():
        words += ["-chardev", f"socket,id=port-{name},fd={descriptor}"]
        words += ["-device", f"virtserialport,chardev=port-{name},name={PORT_PREFIX}{name}"]
    if parts.has_terminal:
        words += ["-chardev", "stdio,id=terminal,signal=off"]
        words += ["-device", "virtconsole,chardev=terminal"]
    return words


def _block_device(name: str, disk: Disk) -> dict[str, object]:
    file = {"driver": "file", "filename": disk.path, "read-only": disk.read_only}
    return {"driver": "raw", "node-name": name, "read-only": disk.read_only, "file": file}


def _escaped(value: str) -> str:
    """QEMU splits options at commas; two of them stand for one."""
    return value.replace(",", ",,")
