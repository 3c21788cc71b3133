"""What this host can do for guests, for ``doctor``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from snapshotter.errors import SnapshotterError
from snapshotter.service.control import Fact
from snapshotter.vm import guest_kernel, machines

KVM_VERDICT = "kvm.json"
KERNELS = "kernels"


def guest_facts(state: Path) -> list[Fact]:
    """One for each thing that ``vm run`` needs; ``state`` is the root's ``vm`` directory."""
    return [
        _found("guest: QEMU", machines.qemu),
        _found("guest: busybox", lambda: str(guest_kernel.busybox())),
        _found("guest: kernel", lambda: str(guest_kernel.find(state / KERNELS).image)),
        _kvm(state / KVM_VERDICT),
    ]


def _found(name: str, look: Callable[[], str]) -> Fact:
    try:
        return Fact(name=name, ok=True, detail=look())
    except SnapshotterError as error:
        detail, _, remedy = str(error).partition(": ")
        return Fact(name=name, ok=False, detail=detail, remedy=remedy)


def _kvm(verdict: Path) -> Fact:
    trouble = machines.kvm_trouble(verdict)
    if trouble is None:
        return Fact(name="guest: KVM", ok=True, detail="/dev/kvm can be opened")
    return Fact(
        name="guest: KVM",
        ok=False,
        detail=trouble,
        remedy="guests run emulated, several times slower; nothing else is lost",
    )
