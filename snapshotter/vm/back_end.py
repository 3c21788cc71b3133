"""Starts the virtio-fs back end of a guest, a process of its own, and ends it after the guest."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import snapshotter
from snapshotter.errors import UnavailableError
from snapshotter.paths import Paths
from snapshotter.service.processes import log_tail
from snapshotter.service.sandbox_user import die_with_parent
from snapshotter.vm.guest import Companion

_START_DEADLINE_S = 20.0
_POLL_S = 0.01
_END_PATIENCE_S = 10.0


@contextmanager
def start_back_end(paths: Paths, words: Sequence[str], socket: Path) -> Iterator[Companion]:
    """Runs ``snapshotter virtiofs`` with ``words`` until the context ends; it listens when given.

    Raises UnavailableError with the end of its log when it does not come to listen.
    """
    log = socket.with_suffix(".log")
    source = str(Path(snapshotter.__file__).parents[1])
    search = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    program = [sys.executable, "-P", "-m", "snapshotter"]
    program += ["--root", str(paths.root), "--run", str(paths.run)]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*program, "virtiofs", *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, "PYTHONPATH": search},
            preexec_fn=die_with_parent,  # noqa: PLW1509 - no other thread has started yet
            start_new_session=True,
        )
    try:
        _wait_until_listening(process, socket, log)
        yield Companion("the virtio-fs back end", process, log)
    finally:
        _end(process)


def _wait_until_listening(process: subprocess.Popen[bytes], socket: Path, log: Path) -> None:
    until = time.monotonic() + _START_DEADLINE_S
    while not socket.exists():
        if process.poll() is not None:
            raise UnavailableError(
                f"the virtio-fs back end ended at its start (status {process.returncode}): "
                f"{log_tail(log)}"
            )
        if time.monotonic() > until:
            raise UnavailableError(
                f"the virtio-fs back end does not listen after {_START_DEADLINE_S:g} s: "
                f"{log_tail(log)}"
            )
        time.sleep(_POLL_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_END_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
