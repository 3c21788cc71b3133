"""A real gate with keeper and store process, and overlay views of hand-made metadata over it."""

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from snapshotter.errors import UnavailableError
from snapshotter.framing import FrameDecoder, encode_frame
from snapshotter.kernel_view import keeper_client, syscalls
from snapshotter.kernel_view.layers import ViewLayers, overlay_options
from snapshotter.names import ContentName
from snapshotter.service import store_control
from snapshotter.store import chunk_table
from tests.support.mounts import detach_all

_REPOSITORY = Path(__file__).resolve().parents[2]
_DEADLINE_S = 20.0


def wait_until(is_so: Callable[[], bool]) -> None:
    """Waits for what another process is about to do."""
    end_s = time.monotonic() + _DEADLINE_S
    while not is_so():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.005)


def name_of(content: bytes) -> ContentName:
    chunks = [content[at : at + (1 << 20)] for at in range(0, len(content), 1 << 20)]
    digests = [hashlib.sha256(chunk).digest() for chunk in chunks]
    return chunk_table.content_name(digests, len(content))


class GateMount:
    """``close`` ends everything, whatever state it is in.

    Its store process is the product's with ``has_real_store``, else ``gate_process``.
    """

    def __init__(
        self, *, patience_s: float = 30.0, deadline_s: float = 30.0, has_real_store: bool = False
    ) -> None:
        self._has_real_store = has_real_store
        self.root = Path(tempfile.mkdtemp(prefix="gate-", dir="/tmp"))
        self.originals = self.root / "originals"
        self.meta = self.root / "meta"
        self._processes: list[subprocess.Popen[bytes]] = []
        for directory in ("objects", "arrivals", "originals"):
            for number in range(256):
                (self.root / directory / f"{number:02x}").mkdir(parents=True)
        for directory in ("run", "gate", "meta"):
            (self.root / directory).mkdir()
        (self.root / "config.toml").write_text(f"lookup_deadline_s = {deadline_s}\n")
        self.keeper_socket = self.root / "run/keeper.sock"
        self.keeper = self._start(
            "snapshotter.kernel_view.keeper",
            f"--socket={self.keeper_socket}",
            f"--patience={patience_s}",
        )
        wait_until(self._keeper_answers)
        self.mount_gate()
        self.store = self.start_store()

    def _keeper_answers(self) -> bool:
        try:
            keeper_client.status(self.keeper_socket)
        except UnavailableError:
            return False
        return True

    def mount_gate(self) -> None:
        device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={device},rootmode=40555,user_id=0,group_id=0,default_permissions,allow_other"
        try:
            syscalls.mount("gate", self.root / "gate", "fuse.gate", 0, options)
            keeper_client.register(self.keeper_socket, device)
        finally:
            os.close(device)

    def start_store(self) -> subprocess.Popen[bytes]:
        if self._has_real_store:
            self.store = self._start(
                "snapshotter.service.store_process",
                f"--root={self.root}",
                f"--run={self.root}/run",
                f"--config={self.root}/config.toml",
            )
        else:
            self.store = self._start(
                "tests.support.gate_process", str(self.root), str(self.originals)
            )
        return self.store

    def _start(self, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", module, *arguments]
        with (self.root / "run" / (module.rpartition(".")[2] + ".log")).open("ab") as log:
            process = subprocess.Popen(
                command, cwd=_REPOSITORY, stderr=log, stdin=subprocess.DEVNULL
            )
        self._processes.append(process)
        return process

    def add_file(self, path: str, content: bytes, mode: int = 0o644) -> ContentName:
        """A cold file of the image; its name is returned."""
        name = name_of(content)
        (self.originals / name.path).write_bytes(content)
        file = self.meta / path
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as opened:
            opened.truncate(len(content))
        file.chmod(mode)
        os.setxattr(file, "trusted.overlay.metacopy", b"")
        os.setxattr(file, "trusted.overlay.redirect", b"/" + name.path.encode())
        return name

    def view(self, *, is_writable: bool = False, image: int = 7) -> Path:
        """A view of the image as it is now, at a place of its own."""
        place = Path(tempfile.mkdtemp(prefix="view-", dir=self.root))
        merged, upper, work = (place / part for part in ("merged", "upper", "work"))
        for directory in (merged, upper, work):
            directory.mkdir()
        layers = ViewLayers(
            metadata=str(self.meta),
            objects=str(self.root / "objects"),
            arrivals=str(self.root / "arrivals"),
            gate=str(self.root / "gate"),
            image_number=image,
            upper=str(upper) if is_writable else None,
            work=str(work) if is_writable else None,
        )
        mount = syscalls.make_mount("overlay", overlay_options(layers))
        try:
            syscalls.move_mount(mount, merged)
        finally:
            os.close(mount)
        return merged

    def fetched(self) -> list[str]:
        """The fetches so far, ``kind name image`` each."""
        path = self.originals / "fetched"
        return path.read_text().splitlines() if path.exists() else []

    def order(self, what: str) -> None:
        """``hold`` or ``fail``: fetches wait or fail from now on."""
        (self.originals / what).touch()

    def release(self, what: str) -> None:
        (self.originals / what).unlink()

    def run(self, *command: str | Path) -> subprocess.Popen[bytes]:
        """A process that uses a view (never this one, which could not be killed when it waits)."""
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self._processes.append(process)
        return process

    def python(self, code: str, *arguments: str | Path) -> subprocess.Popen[bytes]:
        return self.run(sys.executable, "-I", "-S", "-c", code, *arguments)

    def read(self, path: Path) -> bytes:
        """What ``cat`` reads; OSError with its words if it fails."""
        output, errors = self.run("/bin/cat", path).communicate(timeout=_DEADLINE_S)
        if errors:
            raise OSError(errors.decode().strip())
        return output

    def log(self) -> str:
        """What the store processes logged."""
        name = "store_process" if self._has_real_store else "gate_process"
        return (self.root / f"run/{name}.log").read_text()

    def counter(self, name: str) -> int:
        """A counter of the store process, by its control socket."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.root / "run/store.sock"))
            connection.sendall(encode_frame(msgspec.json.encode(store_control.Status())))
            decoder = FrameDecoder()
            while (frame := decoder.next_frame()) is None:
                decoder.feed(connection.recv(65_536))
        return msgspec.json.decode(frame, type=store_control.Running).counters.get(name, 0)

    def close(self) -> None:
        detach_all(self.root, before=self._kill_all)
        self._kill_all()
        shutil.rmtree(self.root)

    def _kill_all(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
        for process in self._processes:
            process.wait(_DEADLINE_S)
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
