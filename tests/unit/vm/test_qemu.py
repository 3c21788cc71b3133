from __future__ import annotations

import json
import subprocess

import pytest

from snapshotter.vm.qemu import Accelerator, Disk, GuestParts, Machine, MachineKind, command_line
from tests.support.debian_image import required_tool


def machine(kind: MachineKind = "microvm", accelerator: Accelerator = "tcg") -> Machine:
    return Machine(program="qemu", kind=kind, accelerator=accelerator, clock_khz=2_500_000)


def parts(**more: object) -> GuestParts:
    values: dict[str, object] = {
        "kernel": "K",
        "initrd": "I",
        "memory_mib": 512,
        "processors": 2,
        "console_log": "log,with comma",
        **more,
    }
    return GuestParts(**values)  # type: ignore[arg-type]


def after(words: list[str], option: str) -> list[str]:
    return [words[at + 1] for at, word in enumerate(words) if word == option]


def test_memory_is_shared_with_the_back_ends() -> None:
    words = command_line(machine(), parts())
    assert after(words, "-object") == ["memory-backend-memfd,id=memory,size=512M,share=on"]
    assert after(words, "-machine") == ["microvm,memory-backend=memory"]


@pytest.mark.parametrize(("kind", "suffix"), [("microvm", "device"), ("q35", "pci")])
def test_devices_are_named_after_the_bus(kind: MachineKind, suffix: str) -> None:
    words = command_line(
        machine(kind),
        parts(
            file_systems={"image": "a,b.sock"},
            disks=[Disk("names,1", True)],
            ports={"status": 7},
            has_terminal=True,
        ),
    )
    assert after(words, "-device") == [
        f"vhost-user-fs-{suffix},chardev=fs-image,tag=image,queue-size=1024",
        f"virtio-blk-{suffix},drive=disk0",
        f"virtio-serial-{suffix}",
        "virtserialport,chardev=port-status,name=snapshotter.status",
        "virtconsole,chardev=terminal",
    ]
    assert "socket,id=fs-image,path=a,,b.sock" in after(words, "-chardev")
    assert "file,id=log,path=log,,with comma" in after(words, "-chardev")
    disk = json.loads(after(words, "-blockdev")[0])
    assert disk["read-only"] is True
    assert disk["file"]["filename"] == "names,1"


def test_the_clock_is_told_where_it_is_emulated() -> None:
    assert "tsc_early_khz=2500000" in after(command_line(machine(), parts()), "-append")[0]
    with_kvm = command_line(machine(accelerator="kvm"), parts(kernel_options="extra"))
    assert after(with_kvm, "-append") == ["console=ttyS0 quiet panic=-1 reboot=t extra"]


@pytest.mark.parametrize("kind", ["microvm", "q35"])
def test_qemu_takes_the_words(kind: MachineKind) -> None:
    """Up to the kernel, which is not there."""
    program = required_tool("qemu-system-x86_64", "qemu-system-x86")
    made = Machine(program=program, kind=kind, accelerator="tcg", clock_khz=1)
    words = command_line(made, parts(kernel="/nonexistent/kernel", console_log="/dev/null"))
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert "could not open kernel file" in done.stderr.replace("qemu: ", "")
