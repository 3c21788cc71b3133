"""A real registry for tests: a container where a Docker engine answers, else Debian's binary.

``running_registry`` starts one on a free loopback port; the ``registry`` fixture shares one with
the whole test session. ``log`` has its access-log lines, so that tests can count requests.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_IMAGE = "registry:2"
_START_DEADLINE_S = 30.0
_CONFIG = """\
version: 0.1
log:
  level: error
  accesslog:
    disabled: false
storage:
  filesystem:
    rootdirectory: {data}
  delete:
    enabled: true
http:
  addr: {address}
"""


class Registry(ABC):
    """A registry on loopback that can be stopped and started again with what it holds."""

    def __init__(self) -> None:
        self.address = f"127.0.0.1:{_free_port()}"

    @property
    def log(self) -> list[str]:
        """The access-log lines so far, oldest first."""
        return [line for line in self._output().splitlines() if '"GET ' in line or "HTTP/" in line]

    def requests(self, method: str, part: str) -> int:
        """How many requests with ``method`` had ``part`` in their path so far."""
        return sum(f'"{method} ' in line and part in line for line in self.log)

    def start(self) -> None:
        """Starts it, and waits until it answers."""
        self._start()
        give_up_at = time.monotonic() + _START_DEADLINE_S
        while not self._answers():
            if time.monotonic() > give_up_at:
                raise RuntimeError(f"registry on {self.address} does not answer:\n{self._output()}")
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.address}/v2/", timeout=2):
                return True
        except (urllib.error.URLError, OSError):
            return False

    @abstractmethod
    def stop(self) -> None:
        """Ends it; its address refuses connections until it is started again."""

    @abstractmethod
    def _start(self) -> None: ...

    @abstractmethod
    def _output(self) -> str: ...


class BinaryRegistry(Registry):
    """Debian's ``docker-registry`` with its own configuration below a directory.

    ``extra`` is put behind the configuration, whose last lines are those of ``http``.
    """

    def __init__(self, directory: Path, extra: str = "") -> None:
        super().__init__()
        binary = shutil.which("docker-registry") or shutil.which("registry")
        if binary is None:
            raise RuntimeError("no Docker engine and no registry: apt-get install docker-registry")
        self._binary = binary
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.yml").write_text(
            _CONFIG.format(data=directory / "data", address=self.address) + extra
        )

    def _start(self) -> None:
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._binary, "serve", str(self._directory / "config.yml")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OTEL_TRACES_EXPORTER": "none"},
            )

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _output(self) -> str:
        return (self._directory / "log").read_text(errors="replace")


class ContainerRegistry(Registry):
    """The same program in a container, on a host port that stays the same over a restart.

    Not testcontainers' own class for it, which needs more packages for its passwords.
    """

    def __init__(self) -> None:
        super().__init__()
        from testcontainers.core.container import DockerContainer

        port = int(self.address.rpartition(":")[2])
        self._container: Any = DockerContainer(_IMAGE).with_bind_ports(5000, port)
        self._exists = False

    def _start(self) -> None:
        if self._exists:
            self._container.get_wrapped_container().start()
        else:
            self._container.start()
            self._exists = True

    def stop(self) -> None:
        self._container.get_wrapped_container().stop(timeout=1)

    def remove(self) -> None:
        """Removes the container."""
        if self._exists:
            self._container.stop()

    def _output(self) -> str:
        return b"".join(self._container.get_logs()).decode(errors="replace")


@contextmanager
def running_registry(directory: Path) -> Iterator[Registry]:
    """A started registry; ``directory`` holds its data when it is not a container."""
    if _engine_answers():
        container = ContainerRegistry()
        try:
            container.start()
            yield container
        finally:
            container.remove()
        return
    binary = BinaryRegistry(directory)
    try:
        binary.start()
        yield binary
    finally:
        binary.stop()


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """One registry for the whole session: tests use image names of their own."""
    with running_registry(tmp_path_factory.mktemp("registry")) as started:
        yield started


def _engine_answers() -> bool:
    """Whether a Docker engine listens on its Unix socket."""
    path = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
            probe.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
            return b" 200 " in probe.recv(64)
        except OSError:
            return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
