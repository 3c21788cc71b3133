from __future__ import annotations

from pathlib import Path

import pytest

from snapshotter.errors import InvalidInputError, UnsupportedError
from snapshotter.vm import machines
from tests.support.debian_image import required_tool


def test_what_kvm_did_is_remembered_for_this_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines.os.path, "exists", lambda path: True)
    monkeypatch.setattr(machines.os, "access", lambda path, mode: True)
    verdict = tmp_path / "state/kvm.json"
    assert machines.accelerators("auto", verdict) == ["kvm", "tcg"]
    machines.remember_kvm_trouble(verdict, "it said nothing")
    assert machines.kvm_trouble(verdict) == "it said nothing"
    assert machines.accelerators("auto", verdict) == ["tcg"]
    with pytest.raises(UnsupportedError, match="KVM: it said nothing"):
        machines.accelerators("kvm", verdict)
    monkeypatch.setattr(machines, "boot_id", lambda: "another boot")
    assert machines.accelerators("kvm", verdict) == ["kvm"]
    verdict.write_text("torn {")
    assert machines.accelerators("auto", verdict) == ["kvm", "tcg"]


def test_without_kvm_guests_are_emulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines.os.path, "exists", lambda path: False)
    assert machines.accelerators("auto", tmp_path / "v") == ["tcg"]
    with pytest.raises(UnsupportedError, match="/dev/kvm is not there"):
        machines.accelerators("kvm", tmp_path / "v")


def test_words_of_users() -> None:
    assert machines.machine_choice("q35") == "q35"
    assert machines.accelerator_choice("auto") == "auto"
    with pytest.raises(InvalidInputError, match="choose one of auto, microvm, q35"):
        machines.machine_choice("pc")


def test_the_fastest_machine_is_taken(tmp_path: Path) -> None:
    program = required_tool("qemu-system-x86_64", "qemu-system-x86")
    assert machines.machine_kind(program, "auto") == "microvm"
    old = tmp_path / "qemu"
    old.write_text("#!/bin/sh\necho 'q35  a PC'\n")
    old.chmod(0o755)
    assert machines.machine_kind(str(old), "auto") == "q35"
    with pytest.raises(UnsupportedError, match="no machine microvm"):
        machines.machine_kind(str(old), "microvm")


def test_other_processors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines.platform, "machine", lambda: "riscv64")
    with pytest.raises(UnsupportedError, match="riscv64"):
        machines.qemu()
