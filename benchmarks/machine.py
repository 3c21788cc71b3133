"""What the figures were taken on."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

_REPOSITORY = Path(__file__).resolve().parents[1]


def describe() -> dict[str, Any]:
    """Machine, kernel, file system and commit."""
    return {
        "processor": _first_value("/proc/cpuinfo", "model name"),
        "processors": os.cpu_count(),
        "memory": _first_value("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "file_system": _output("stat", "-f", "-c", "%T", "/tmp"),
        "load": os.getloadavg()[0],
        "commit": _output("git", "-C", str(_REPOSITORY), "rev-parse", "--short", "HEAD"),
        "changed_files": len(
            _output("git", "-C", str(_REPOSITORY), "status", "--porcelain").splitlines()
        ),
    }


def _first_value(path: str, key: str) -> str:
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return "unknown"


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"
