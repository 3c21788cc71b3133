"""The product as its users run it: real processes below a directory of its own, by its CLI.

Everything that was started is found again by a mark in its environment, and everything mounted by
its place, so that ``close`` leaves nothing behind whatever state a test ended in.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.mounts import detach_all, mounts_below

_MARK = "LAZY_SNAPSHOTTER_TEST"
_REPOSITORY = Path(__file__).resolve().parents[2]
_DEADLINE_S = 60.0
_POLL_S = 0.05


class _Owned:
    """A short directory on a real disk (socket paths are limited) and the processes below it."""

    def __init__(self, prefix: str) -> None:
        self.base = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))
        self.environment = {
            **os.environ,
            _MARK: str(self.base),
            "PYTHONPATH": str(_REPOSITORY),
            "NO_COLOR": "1",
        }

    def processes(self) -> list[int]:
        """The pids of all living processes that were started, directly or not, for this."""
        mark = f"{_MARK}={self.base}".encode()
        found = []
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            with contextlib.suppress(OSError):
                environment = Path(f"/proc/{pid}/environ").read_bytes()
                if mark in environment.split(b"\0") and not _is_zombie(pid):
                    found.append(pid)
        return found

    def end(self) -> None:
        """Ends every process and every mount; files stay."""
        self._kill_all()
        detach_all(self.base, before=self._kill_all)
        if (left := self.processes()) or mounts_below(self.base):
            raise RuntimeError(f"left behind: processes {left}, {mounts_below(self.base)}")

    def close(self) -> None:
        """Ends everything and removes the directory; closing again does nothing."""
        if self.base.exists():
            try:
                self.end()
            finally:
                shutil.rmtree(self.base, ignore_errors=True)

    def _kill_all(self) -> None:
        give_up_at = time.monotonic() + _DEADLINE_S
        while (pids := self.processes()) and time.monotonic() < give_up_at:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not any(_has_ended(pid) for pid in pids):
                return  # waiting in the kernel for a mount that is aborted next
            time.sleep(_POLL_S)


class CacheServer(_Owned):
    """A cache server of its own."""

    def __init__(self) -> None:
        super().__init__("lazy-srv-")
        self.root = self.base / "root"
        self.socket = self.base / "cache.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it and waits until its socket answers."""
        places = ["--root", str(self.root), "--socket", str(self.socket)]
        with (self.base / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "cache_server", "serve", *places],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
            )
        await_true(self._answers, f"cache server on {self.socket}", log=self.log)

    def kill(self) -> None:
        """SIGKILL, and waits for the end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def end(self) -> None:
        """Ends it."""
        self.kill()
        super().end()

    def log(self) -> str:
        """What it logged."""
        return (self.base / "log").read_text(errors="replace")

    def packs(self) -> list[Path]:
        """The files that hold the content."""
        return sorted(self.root.rglob("*.pack"))

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.socket)) == 0


class CliError(Exception):
    """A command failed that a test needs; the text has all it said."""


class Product(_Owned):
    """The snapshotter below a directory of its own."""

    def __init__(
        self, settings: Mapping[str, object] | None = None, *, server: Path | None = None
    ) -> None:
        """``server`` is the socket of a cache server; None lets the daemon start its own."""
        super().__init__("lazy-e2e-")
        self.root = self.base / "root"
        self.run = self.base / "run"
        lines = dict(settings or {})
        if server is not None:
            lines |= {"cache_server": "external", "cache_socket": str(server)}
        self.config = self.base / "config.toml"
        self.config.write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in lines.items()))

    def command(self, *arguments: str | os.PathLike[str]) -> list[str]:
        """The full command line of a CLI call."""
        places = ["--root", str(self.root), "--run", str(self.run), "--config", str(self.config)]
        return [
            sys.executable,
            "-m",
            "snapshotter",
            *places,
            *(os.fspath(argument) for argument in arguments),
        ]

    def cli(
        self, *arguments: str | os.PathLike[str], input_text: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs the CLI to its end, whatever its exit code."""
        return subprocess.run(
            self.command(*arguments),
            input=input_text,
            stdin=subprocess.DEVNULL if input_text is None else None,
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            env=self.environment,
            cwd=self.base,
        )

    def do(self, *arguments: str | os.PathLike[str]) -> str:
        """Runs the CLI, which must succeed; its standard output."""
        done = self.cli(*arguments)
        if done.returncode:
            raise CliError(f"{arguments}: exit {done.returncode}\n{done.stderr}\n{self.logs()}")
        return done.stdout

    def ask(self, *arguments: str | os.PathLike[str]) -> Any:
        """Runs the CLI with ``--json``; what it answered."""
        return json.loads(self.do("--json", *arguments))

    def mount(self, image: str, name: str, *options: str | os.PathLike[str]) -> Path:
        """Mounts an image at a new directory ``name``; its path."""
        target = self.base / name
        target.mkdir(exist_ok=True)
        self.do("mount", image, target, *options)
        return target

    def status(self) -> dict[str, Any]:
        """What ``daemon status`` says."""
        answer: dict[str, Any] = self.ask("daemon", "status")
        return answer

    def counters(self) -> dict[str, int]:
        """All counters of the running processes."""
        counters: dict[str, int] = self.status()["counters"]
        return counters

    def pid(self, process: str) -> int:
        """The pid of one of the product's processes, which must be up."""
        pid = self.status()["processes"].get(process)
        if pid is None:
            raise CliError(f"{process} is not up: {self.status()}\n{self.logs()}")
        return int(pid)

    def kill(self, process: str) -> int:
        """SIGKILLs one of the product's processes and waits for its end; the pid it had."""
        pid = self.pid(process)
        descriptor = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            select.select([descriptor], [], [], _DEADLINE_S)
        finally:
            os.close(descriptor)
        return pid

    def await_successor(self, process: str, former: int) -> int:
        """Waits until another process has taken the place of ``former``; its pid."""

        def is_replaced() -> bool:
            return self.status()["processes"].get(process) not in (None, former)

        await_true(is_replaced, f"a new {process}", log=self.logs)
        return self.pid(process)

    def log(self, process: str) -> str:
        """What one of the product's processes logged."""
        path = self.run / f"{process}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def logs(self) -> str:
        """The end of every log, for a failure's message."""
        names = sorted(path.stem for path in self.run.glob("*.log"))
        return "\n".join(f"--- {name}.log\n{self.log(name)[-3000:]}" for name in names)

    def cut_off(self) -> None:
        """SIGKILLs every process and takes every mount away, as when the machine goes down."""
        super().end()

    def end(self) -> None:
        """Unmounts and stops everything; by force what does not go by itself."""
        for mount in reversed(mounts_below(self.base)):
            if mount.fs_type == "overlay":
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.cli("umount", "--lazy", mount.target)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.cli("daemon", "stop")
        super().end()


def await_true(
    condition: Callable[[], bool], what: str, *, log: Callable[[], str] = lambda: ""
) -> None:
    """Polls until ``condition`` holds; an error with the log when it does not in time."""
    give_up_at = time.monotonic() + _DEADLINE_S
    while not condition():
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"{what}: waited {_DEADLINE_S} s\n{log()}")
        time.sleep(_POLL_S)


NewProduct = Callable[..., Product]


@pytest.fixture(scope="session")
def cache_server() -> Iterator[CacheServer]:
    """One cache server for the session: every image is imported once."""
    server = CacheServer()
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def new_product() -> Iterator[NewProduct]:
    """Makes products (arguments as of Product) that end with the test."""
    with contextlib.ExitStack() as stack:

        def make(*arguments: Any, **options: Any) -> Product:
            product = Product(*arguments, **options)
            stack.callback(product.close)
            return product

        yield make


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def _has_ended(pid: int) -> bool:
    """Waits a moment for a killed process; whether it is gone (a zombie is)."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 1.0)[0])
    finally:
        os.close(descriptor)
