"""The product and the inputs that the cases share: one cache server with every image imported."""

import contextlib
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

from benchmarks import fixture
from snapshotter.kernel_view import syscalls
from tests.support.debian_image import LocalImage, debian_image
from tests.support.product import CacheServer, Product


class World:
    """A context manager; everything in it is below /tmp and goes with it.

    Nothing is removed before the end: on an ext4 without a journal, creating files takes ten
    times as long in the seconds after many were removed.
    """

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._count = 0

    def __enter__(self) -> "World":
        base = tempfile.mkdtemp(prefix="lazy-bench-", dir="/tmp")
        self.base = Path(base)
        self._stack.callback(shutil.rmtree, self.base, ignore_errors=True)
        self.native = fixture.write_native(self.base / "native")
        self.image = fixture.write_image(self.base / "image")
        self.server = CacheServer()
        self._stack.callback(self.server.close)
        self.server.start()
        self.product = self.new_product()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def new_product(self) -> Product:
        """A snapshotter with nothing in its store; it ends with the world, or by its end()."""
        product = Product(server=self.server.socket)
        self._stack.callback(product.close)
        return product

    def debian(self) -> LocalImage:
        """The Debian image of the tests."""
        return debian_image()

    def many_entries(self) -> LocalImage:
        """The image of 100,000 entries."""
        return fixture.write_many_entries_image(self.base / "many")

    def directory(self, purpose: str) -> Path:
        """A new empty directory."""
        self._count += 1
        path = self.base / f"{purpose}-{self._count}"
        path.mkdir()
        return path

    def view(self, *options: str) -> Path:
        """A new mount of the tree's image by the shared product."""
        self._count += 1
        return self.product.mount(self.image.reference, f"view-{self._count}", *options)

    def unmount(self, view: Path) -> None:
        """Ends a mount made by ``view``."""
        self.product.do("umount", view)

    def overlay(self, lower: Path) -> Path:
        """A new kernel overlayfs over a plain directory, its upper as volatile as a view's own."""
        base = self.directory("overlay")
        for name in ("upper", "work", "merged"):
            (base / name).mkdir()
        options = f"lowerdir={lower},upperdir={base}/upper,workdir={base}/work,volatile"
        syscalls.mount("overlay", base / "merged", "overlay", 0, options)
        self._stack.callback(self._discard_overlay, base / "merged")
        return base / "merged"

    @staticmethod
    def _discard_overlay(merged: Path) -> None:
        with contextlib.suppress(OSError):
            syscalls.umount(merged, syscalls.MNT_DETACH)


def run_quietly(*command: str | Path) -> None:
    """Runs a command that must succeed; its output is shown only when it does not."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command}: exit {done.returncode}\n{done.stderr}")
