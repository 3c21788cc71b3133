"""The example with a QEMU command line of one's own, and `vm initrd`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from snapshotter.vm import cpio
from tests.support.debian_image import LocalImage
from tests.support.guests import GUEST_DEADLINE_S, Guests

pytestmark = [pytest.mark.real, pytest.mark.mount, pytest.mark.timeout(400)]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/qemu_by_hand.sh"
INIT = b"""#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
for module in /modules/*.ko; do [ ! -e "$module" ] || insmod "$module"; done
mkdir /newroot && mount -t virtiofs image /newroot
echo "image: $(head -n 1 /newroot/etc/os-release)"
echo written >/newroot/root/by-hand
umount /newroot
poweroff -f
"""


def test_the_example_boots_an_image_and_keeps_its_upper(
    guests: Guests, guest_kernels: Path, debian: LocalImage, tmp_path: Path
) -> None:
    product = guests.product
    product.do("vm", "initrd", "--machine", "q35", tmp_path / "initrd")
    with (tmp_path / "initrd").open("ab") as file:
        file.write(cpio.encode([cpio.regular("init", INIT, executable=True)]))
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/snapshotter"
    program.write_text(f'#!/bin/sh\nexec {" ".join(product.command())} "$@"\n')
    program.chmod(0o755)
    (kernel,) = guest_kernels.glob("*/vmlinuz")
    upper = product.base / "by-hand"
    done = subprocess.run(
        [EXAMPLE, debian.reference, kernel, tmp_path / "initrd", upper],
        env={
            **product.environment,
            "PATH": f"{tmp_path}/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "ACCELERATOR": "tcg",
        },
        capture_output=True,
        text=True,
        timeout=GUEST_DEADLINE_S,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    assert 'image: PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"' in done.stdout
    assert (upper / "upper/root/by-hand").read_text() == "written\n"


def test_an_initramfs_that_was_written_is_used(
    guests: Guests, debian: LocalImage, tmp_path: Path
) -> None:
    guests.product.do("vm", "initrd", tmp_path / "initrd")
    done = guests.run(debian.reference, f"--initrd={tmp_path / 'initrd'}", "/bin/echo", "it runs")
    assert (done.stdout, done.stderr, done.returncode) == (b"it runs\n", b"", 0)
