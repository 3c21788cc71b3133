"""What containers leave outside of their containerd's directory, and how to take all of it away.

A shim is found by the address on its command line; what it runs are its children. Of what is
below /run/containerd and in the cgroup hierarchies, only that of the tasks in ``state`` is touched.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

_TASKS = "io.containerd.runtime.v2.task"
_RUNC_STATE = Path("/run/containerd/runc")
_FIFOS = Path("/run/containerd/fifo")
_CGROUPS = Path("/sys/fs/cgroup")
_DEADLINE_S = 10.0


def remove(address: Path, state: Path) -> None:
    """Ends the shims of the containerd at ``address`` and their containers, and tidies up."""
    shims = list(_shims(address))
    for pid in (*_children(set(shims)), *shims):
        _kill(pid)
    for bundle in state.glob(f"{_TASKS}/*/*"):
        _remove_task(bundle)
    for tasks in state.glob(f"{_TASKS}/*"):
        for directory in (*_CGROUPS.glob(f"*/{tasks.name}"), _RUNC_STATE / tasks.name):
            _remove_empty(directory)


def _remove_task(bundle: Path) -> None:
    namespace, name = bundle.parent.name, bundle.name
    with contextlib.suppress(OSError):
        socket = (bundle / "address").read_text().strip().removeprefix("unix://")
        os.unlink(socket)
    shutil.rmtree(_RUNC_STATE / namespace / name, ignore_errors=True)
    for fifo in _FIFOS.glob(f"*/{name}-std*"):
        fifo.unlink()
        _remove_empty(fifo.parent)
    for directory in _CGROUPS.glob(f"*/{namespace}/{name}"):
        _remove_empty(directory)


def _remove_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):  # somebody else's is in it
        directory.rmdir()


def _shims(address: Path) -> Iterator[int]:
    for pid in _pids():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"containerd-shim" in words[0] and os.fsencode(address) in words:
                yield pid


def _children(parents: set[int]) -> Iterator[int]:
    for pid in _pids():
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{pid}/stat").read_text()
            if int(stat.rpartition(")")[2].split()[1]) in parents:
                yield pid


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _kill(pid: int) -> None:
    """SIGKILL, and waits for the end for a while: not for ever for what the kernel holds."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        select.select([descriptor], [], [], _DEADLINE_S)
    finally:
        os.close(descriptor)
