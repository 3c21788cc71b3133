"""`snapshotter virtiofs` as users start it, with a front end in the place of their VMM."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.product import Product, await_true
from tests.support.vhost_user_front_end import FrontEnd


@dataclass(slots=True)
class VirtiofsProcess:
    """The process, its socket, and a guest that has connected to it."""

    process: subprocess.Popen[str]
    socket: Path
    guest: FrontEnd


@contextlib.contextmanager
def virtiofs_process(
    product: Product, image: str, *options: str | Path
) -> Iterator[VirtiofsProcess]:
    """Started, and connected to; at its end the guest hangs up and the process must follow."""
    socket = product.base / "fs.sock"
    process = subprocess.Popen(
        product.command("virtiofs", image, "--socket", socket, *options),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=product.environment,
    )
    try:
        await_true(lambda: socket.exists() or process.poll() is not None, "the socket")
        if process.poll() is not None:
            raise AssertionError(process.communicate()[1])
        guest = FrontEnd(str(socket))
        try:
            yield VirtiofsProcess(process, socket, guest)
        finally:
            guest.close()
        said = process.communicate(timeout=60)[1]
        assert process.returncode == 0, said
    finally:
        process.kill()
        process.communicate()
