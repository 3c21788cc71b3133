"""What a request costs the virtio-fs back end, against QEMU's virtiofsd in C.

    python -m benchmarks.virtiofs [--rounds N]

No virtual machine: the front end of the tests sends one request at a time and waits for it. Both
back ends serve the same tree, in turns, and the processor time of each is taken from its clock, so
that what the front end costs does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import machine
from snapshotter.fuse.cache_policy import BRIEF, KernelCache
from snapshotter.fuse.file_system_server import FileSystemServer
from snapshotter.fuse.virtiofs.device import Device
from snapshotter.fuse.virtiofs.requests import FuseRequests
from snapshotter.fuse.wire import Opcode
from tests.support.file_systems import file_system
from tests.support.fuse_client import FuseClient
from tests.support.vhost_user_front_end import FrontEnd
from tests.support.virtiofs_guest import asker

VIRTIOFSD = "/usr/lib/qemu/virtiofsd"
KIB, MIB = 1 << 10, 1 << 20
FILE_BYTES = 256 * MIB
PAGE = 4 * KIB
RING = 1024
HEADER = struct.Struct("=IIQQIIIHxx")
REQUESTS = 3000
OURS = {"image": "image alone merged", "overlay": "upper on an image"}
Request = tuple[int, int, bytes, list[int], bool]
"""Opcode, nodeid, body, room, and whether that is scattered in the guest's memory."""


def make_tree(directory: Path) -> None:
    directory.mkdir()
    (directory / "many").mkdir()
    for number in range(64):
        (directory / "many" / f"file{number:03}").write_bytes(b"%d" % number)
    with (directory / "big").open("wb") as file:
        for _ in range(FILE_BYTES // MIB):
            file.write(os.urandom(MIB))


def serve(kind: str, tree: Path, path: Path) -> None:
    """Our back end on ``path``, for one guest; the content is in the page cache already."""
    with (
        tempfile.TemporaryDirectory(dir=tree.parent) as base,
        file_system(kind, tree, Path(base)) as fs,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        server = FileSystemServer(
            fs, KernelCache(BRIEF), writable="upper" in kind, report_fault=_report
        )
        listener.bind(str(path))
        listener.listen(1)
        connection, _ = listener.accept()
        with connection:
            Device(connection, FuseRequests(server), _report).serve()
        server.connection.clear()


def _report(*what: object) -> None:
    print(*what, file=sys.stderr)


@contextlib.contextmanager
def running(command: list[str], path: Path) -> Iterator[tuple[FrontEnd, int]]:
    """A back end and a guest of it; with the back end's pid."""
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        while not path.exists():
            time.sleep(0.02)
        time.sleep(0.2)  # virtiofsd makes its socket before it listens
        guest = FrontEnd(str(path), size=RING)
        try:
            yield guest, process.pid
        finally:
            guest.close()
        process.wait(30)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def processor_ns(pid: int) -> int:
    """Processor time of a process and its children (virtiofsd forks) so far, in ns."""
    total = time.clock_gettime_ns(~pid << 3 | 2)
    for task in os.listdir(f"/proc/{pid}/task"):
        children = Path(f"/proc/{pid}/task/{task}/children").read_text().split()
        total += sum(processor_ns(int(child)) for child in children)
    return total


class Requests:
    """The requests that are measured, for one back end."""

    def __init__(self, guest: FrontEnd) -> None:
        client = FuseClient(asker(guest))
        self._client = client  # what it knows it must not forget
        self._kept = [client.lookup(client.root, name).node for name in (b"many", b"big")]
        self._many, self._big = (node.nodeid for node in self._kept)
        self._file = client.open(self._kept[1], os.O_RDONLY)

    def getattr(self, _: int) -> Request:
        return Opcode.GETATTR, self._big, bytes(16), [16, 104], False

    def lookup(self, number: int) -> Request:
        name = b"file%03d\0" % (number % 64)
        return Opcode.LOOKUP, self._many, name, [16, 128], False

    def miss(self, number: int) -> Request:
        return Opcode.LOOKUP, self._many, b"none%03d\0" % (number % 64), [16, 128], False

    def read(self, size: int, *, scattered: bool) -> Callable[[int], Request]:
        room = [16, *[min(PAGE, size)] * max(1, size // PAGE)]

        def make(number: int) -> Request:
            offset = number * size % FILE_BYTES
            body = struct.pack("=QQIIQI4x", self._file.handle, offset, size, 0, 0, 0)
            return Opcode.READ, self._big, body, room, scattered

        return make


def cost_us(guest: FrontEnd, pid: int, make: Callable[[int], Request], count: int) -> float:
    """Processor time of one request in µs."""
    before = processor_ns(pid)
    for number in range(count):
        opcode, nodeid, body, room, scattered = make(number)
        head = HEADER.pack(HEADER.size + len(body), opcode, 2, nodeid, 0, 0, 1, 0)
        slot, _ = guest.build([head, body], room, scattered=scattered)
        guest.queues[1].post_and_kick(slot)
        guest.wait()
    return (processor_ns(pid) - before) / count / 1000


def measure(guest: FrontEnd, pid: int) -> dict[str, float]:
    requests = Requests(guest)
    whole = FILE_BYTES
    cases: dict[str, tuple[Callable[[int], Request], int]] = {
        "GETATTR": (requests.getattr, REQUESTS),
        "LOOKUP": (requests.lookup, REQUESTS),
        "LOOKUP, absent": (requests.miss, REQUESTS),
        "READ 4 KiB": (requests.read(4 * KIB, scattered=False), REQUESTS),
        "READ 128 KiB": (requests.read(128 * KIB, scattered=False), whole // (128 * KIB)),
        "READ 128 KiB, scattered": (
            requests.read(128 * KIB, scattered=True), whole // (128 * KIB),
        ),
        "READ 1 MiB": (requests.read(MIB, scattered=False), whole // MIB),
        "READ 1 MiB, scattered": (requests.read(MIB, scattered=True), whole // MIB),
    }  # fmt: skip
    found = {}
    for name, (make, count) in cases.items():
        cost_us(guest, pid, make, min(count, 200))
        found[name] = cost_us(guest, pid, make, count)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", nargs=3, metavar=("KIND", "TREE", "SOCKET"))
    options = parser.parse_args()
    if options.serve:
        kind, tree, path = options.serve
        serve(kind, Path(tree), Path(path))
        return
    samples: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="virtiofs-") as base:
        tree = Path(base) / "tree"
        make_tree(tree)
        for number in range(options.rounds):
            for name, command in commands(tree).items():
                path = Path(base) / f"{name}{number}.sock"
                with running([*command, str(path)], path) as (guest, pid):
                    samples.setdefault(name, []).append(measure(guest, pid))
    print(json.dumps(machine.describe()))
    print(table(samples))


def commands(tree: Path) -> dict[str, list[str]]:
    ours = [sys.executable, "-m", "benchmarks.virtiofs", "--serve"]
    found = {name: [*ours, kind, str(tree)] for name, kind in OURS.items()}
    found["virtiofsd"] = [
        "/bin/sh", "-c", 'exec "$0" -f -o "source=$1" --socket-path="$2"', VIRTIOFSD, str(tree),
    ]  # fmt: skip
    return found


def table(samples: dict[str, list[dict[str, float]]]) -> str:
    """Median costs, with the median of the ratios within each round."""
    reference = samples["virtiofsd"]
    lines = ["| µs of processor time | virtiofsd | image | ratio | overlay | ratio |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for case in reference[0]:
        cells = [f"{statistics.median(each[case] for each in reference):.1f}"]
        for name in OURS:
            ours = samples[name]
            pairs = zip(ours, reference, strict=True)
            ratio = statistics.median(mine[case] / theirs[case] for mine, theirs in pairs)
            cells += [f"{statistics.median(each[case] for each in ours):.1f}", f"{ratio:.2f}"]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
