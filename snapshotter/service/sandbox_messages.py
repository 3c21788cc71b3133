"""What is said between whoever keeps a sandbox open and the processes behind it.

Both ends are of the same installation and talk over sockets that were inherited, so this is no
format to keep. It is JSON as the standard library writes it, which takes any file name or
argument that the kernel takes (msgspec refuses those that are not UTF-8).

A sandbox's socket (SEQPACKET) carries messages of one kind byte and a body:

========  =============================  ==================================================
``H``     sandbox, first                 its pid
``N``     asker: enter the root          surroundings and staging; the view beside it
``O``     answer to ``N``                nothing; a descriptor of the root beside it
``R``     asker: run a command           nothing; RUN_DESCRIPTORS beside it
``X``     asker: leave the root          nothing; the answer is ``X`` once the view is free
``F``     sandbox: it could not          the message
========  =============================  ==================================================

A run's own socket (SEQPACKET) carries sandbox_init's reports and, last, REPORT_ENDED with the
exit status. The asker sends KILL on it; its end going away means the same.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from snapshotter.service.sandbox_spec import Plan, Surroundings, Volume

HELLO, ENTER, ENTERED, RUN, RELEASE, FAILED = b"H", b"N", b"O", b"R", b"X", b"F"

RUN_DESCRIPTORS = 5
"""Beside a run: the plan (a memory file), stdin, stdout, stderr, and the run's own socket."""

REPORT_ENDED = b"E"
"""Followed by one byte, the command's exit status (128+n for signal n)."""
KILL = b"K"
"""Ends every process of a run."""

MESSAGE_BYTES = 1 << 17


def encode_entry(surroundings: Surroundings, staging: Path) -> bytes:
    """The body of ENTER."""
    body = dataclasses.asdict(surroundings) | {"staging": str(staging)}
    return json.dumps(body).encode()


def decode_entry(body: bytes) -> tuple[Surroundings, Path]:
    """What ``encode_entry`` was given."""
    fields: dict[str, Any] = json.loads(body)
    staging = Path(fields.pop("staging"))
    volumes = [Volume(**volume) for volume in fields.pop("volumes")]
    return Surroundings(**fields, volumes=volumes), staging


def write_plan(plan: Plan) -> int:
    """A memory file of the plan, which may be larger than a message; the caller closes it."""
    body = dataclasses.asdict(plan) | {"environment": dict(plan.environment)}
    descriptor = os.memfd_create("snapshotter-plan")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(json.dumps(body).encode())
    return descriptor


def read_plan(descriptor: int) -> Plan:
    """The plan of a memory file, wherever its offset stands."""
    size = os.fstat(descriptor).st_size
    return Plan(**json.loads(os.pread(descriptor, size, 0)))
