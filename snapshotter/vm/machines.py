"""What guests can run on here: QEMU, its machine, and whether KVM really starts a guest."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Literal, TypeVar, get_args

import msgspec

from snapshotter.decoding import DECODE_ERRORS
from snapshotter.errors import InvalidInputError, UnsupportedError
from snapshotter.service.mounts import boot_id
from snapshotter.vm.qemu import Accelerator, Machine, MachineKind

AcceleratorChoice = Literal["auto", "kvm", "tcg"]
MachineChoice = Literal["auto", "microvm", "q35"]

Choice = TypeVar("Choice", bound=str)

_QEMU = "qemu-system-x86_64"
_CPU_MHZ = re.compile(r"^cpu MHz\s*:\s*([0-9.]+)", re.MULTILINE)
_DEFAULT_CLOCK_KHZ = 2_000_000
_PROBE_TIMEOUT_S = 10


def accelerator_choice(text: str) -> AcceleratorChoice:
    """A user's word for it; InvalidInputError for another."""
    return _choice("accelerator", text, get_args(AcceleratorChoice))


def machine_choice(text: str) -> MachineChoice:
    """A user's word for it; InvalidInputError for another."""
    return _choice("machine", text, get_args(MachineChoice))


def _choice(what: str, text: str, known: tuple[Choice, ...]) -> Choice:
    for choice in known:
        if choice == text:
            return choice
    raise InvalidInputError(f"{what} {text!r}: choose one of {', '.join(map(str, known))}")


class KvmVerdict(msgspec.Struct, frozen=True):
    """That KVM did not start a guest in this boot of the host, and what was seen instead."""

    boot_id: str
    reason: str


def qemu() -> str:
    """The emulator's path. Raises UnsupportedError that says what to install."""
    if platform.machine() != "x86_64":
        raise UnsupportedError(f"guests run on x86_64 hosts; this one is {platform.machine()}")
    found = shutil.which(_QEMU)
    if found is None:
        raise UnsupportedError(
            f"guests need {_QEMU}, which is not on this host: apt-get install qemu-system-x86"
        )
    return found


def machine_kind(program: str, wanted: MachineChoice) -> MachineKind:
    """``wanted``, or the fastest that this QEMU has. UnsupportedError if it lacks the wanted."""
    known = subprocess.run(
        [program, "-machine", "help"],
        capture_output=True,
        text=True,
        timeout=_PROBE_TIMEOUT_S,
        check=False,
    ).stdout
    names = {line.partition(" ")[0] for line in known.splitlines()}
    if wanted == "auto":
        return "microvm" if "microvm" in names else "q35"
    if wanted not in names:
        raise UnsupportedError(f"{program} has no machine {wanted}; use --machine auto")
    return wanted


def clock_khz() -> int:
    """The clock of the host's processors."""
    match = _CPU_MHZ.search(Path("/proc/cpuinfo").read_text())
    return int(float(match[1]) * 1000) if match else _DEFAULT_CLOCK_KHZ


def kvm_trouble(verdict_file: Path) -> str | None:
    """Why KVM cannot be used, None if nothing is known against it."""
    if not os.path.exists("/dev/kvm"):
        return "/dev/kvm is not there: no hardware virtualization, or its module is not loaded"
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return "/dev/kvm may not be opened by this user: add the user to the group kvm"
    try:
        verdict = msgspec.json.decode(verdict_file.read_bytes(), type=KvmVerdict)
    except (OSError, *DECODE_ERRORS):
        return None
    return verdict.reason if verdict.boot_id == boot_id() else None


def remember_kvm_trouble(verdict_file: Path, reason: str) -> None:
    """So that the next guests of this boot lose no time."""
    verdict_file.parent.mkdir(parents=True, exist_ok=True)
    temporary = verdict_file.with_name(f".{verdict_file.name}.{os.getpid()}")
    temporary.write_bytes(msgspec.json.encode(KvmVerdict(boot_id(), reason)))
    temporary.replace(verdict_file)


def accelerators(wanted: AcceleratorChoice, verdict_file: Path) -> list[Accelerator]:
    """What to try, in order. UnsupportedError when KVM was asked for and cannot be had."""
    if wanted == "tcg":
        return ["tcg"]
    trouble = kvm_trouble(verdict_file)
    if wanted == "kvm":
        if trouble is not None:
            raise UnsupportedError(f"KVM: {trouble}; use --accelerator auto")
        return ["kvm"]
    return ["tcg"] if trouble is not None else ["kvm", "tcg"]


def machine(program: str, kind: MachineKind, accelerator: Accelerator) -> Machine:
    """The machine of these."""
    return Machine(program=program, kind=kind, accelerator=accelerator, clock_khz=clock_khz())
