"""Guests under real QEMU with Debian's real kernel, for tests.

The kernel is fetched once, into .cache/. Guests run emulated: it works on every machine.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
from pathlib import Path

import pytest

from snapshotter.vm import debian_kernel
from tests.support.debian_image import required_tool
from tests.support.product import Product, await_true

_CACHE = Path(__file__).resolve().parents[2] / ".cache"
GUEST_DEADLINE_S = 240.0


@pytest.fixture(scope="session")
def guest_kernels() -> Path:
    """A directory of guest kernels, with Debian's."""
    required_tool("qemu-system-x86_64", "qemu-system-x86")
    required_tool("busybox", "busybox-static")
    kernels = _CACHE / "guest-kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    with (_CACHE / "guest-kernels.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(kernels.glob("*/vmlinuz")):
            debian_kernel.fetch(kernels)
    return kernels


class Guests:
    """``vm run`` of a product."""

    def __init__(self, product: Product, kernels: Path) -> None:
        self.product = product
        state = product.root / "vm"
        state.mkdir(parents=True)
        (state / "kernels").symlink_to(kernels)

    def words(self, image: str, *words: str | os.PathLike[str]) -> list[str]:
        """The command line of a run; ``words`` may begin with options."""
        options = [word for word in words if str(word).startswith("--")]
        command = words[len(options) :]
        return self.product.command(
            "vm", "run", "--accelerator=tcg", *options, image, "--", *command
        )

    def run(
        self, image: str, *words: str | os.PathLike[str], stdin: bytes = b""
    ) -> subprocess.CompletedProcess[bytes]:
        """Runs a command in a guest to its end."""
        return subprocess.run(
            self.words(image, *words),
            input=stdin,
            capture_output=True,
            timeout=GUEST_DEADLINE_S,
            env=self.product.environment,
            cwd=self.product.base,
        )

    def shell(self, image: str, *options: str, script: str) -> str:
        """The output of a shell script, which must succeed in silence."""
        done = self.run(image, *options, "/bin/sh", "-euc", script)
        assert (done.stderr.decode(), done.returncode) == ("", 0)
        return done.stdout.decode()

    def begin(self, image: str, *words: str) -> subprocess.Popen[bytes]:
        """Starts a guest; returns once its command has written a line."""
        process = subprocess.Popen(
            self.words(image, *words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.product.environment,
            cwd=self.product.base,
        )
        assert process.stdout is not None
        assert process.stdout.readline() != b""
        return process

    def back_ends(self) -> list[int]:
        """The pids of the back ends that live."""
        return [pid for pid in self.product.processes() if b"virtiofs_process" in _words(pid)]

    def await_nothing_left(self) -> None:
        """Returns once no guest, no back end and no directory of one is left."""

        def is_gone() -> bool:
            programs = [_words(pid) for pid in self.product.processes()]
            busy = [words for words in programs if b"qemu" in words or b"virtiofs" in words]
            return not busy and not list(self.product.run.glob("vm-*"))

        await_true(is_gone, "the end of all guests")
        assert not list((self.product.root / "vm").glob("uppers/upper-*"))


def kill(pid: int) -> None:
    """SIGKILL."""
    os.kill(pid, signal.SIGKILL)


def _words(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
