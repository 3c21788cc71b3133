"""The units are what systemd accepts, and start what they are meant to."""

import configparser
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from snapshotter.paths import default_paths

UNITS = Path(__file__).parents[3] / "examples/systemd"
PROGRAMS = "/opt/lazy-snapshotter/bin/"


def commands() -> list[list[str]]:
    found = []
    for path in sorted(UNITS.glob("*.service")):
        match = re.search(r"^ExecStart=(.*)$", path.read_text(), re.MULTILINE)
        assert match is not None, path
        found.append(shlex.split(match[1]))
    return found


def test_systemd_accepts_every_unit(tmp_path: Path) -> None:
    """With our programs replaced by one that this machine has: it checks that they exist."""
    for unit in UNITS.iterdir():
        text = re.sub(rf"{PROGRAMS}\S+", "/bin/true", unit.read_text())
        (tmp_path / unit.name).write_text(text)
    units = sorted(tmp_path.iterdir())
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True
    )
    ours = [line for line in checked.stderr.splitlines() if str(tmp_path) in line]
    assert (checked.returncode, ours) == (0, []), checked.stderr


@pytest.mark.parametrize("command", commands(), ids=lambda command: Path(command[0]).name)
def test_the_programs_know_their_options(command: list[str]) -> None:
    program = command[0].removeprefix(PROGRAMS)
    words = [word for word in command[1:] if not word.startswith("/")]
    start = [] if program == "python" else ["-m", program.replace("-", "_")]
    shown = subprocess.run(
        [sys.executable, *start, *(word for word in words if not word.startswith("--")), "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(UNITS.parents[1])},
    )
    for option in (word for word in words if word.startswith("--")):
        assert option in shown.stdout


def test_the_daemon_outlives_nothing_that_it_should_and_is_where_commands_look() -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment]
    unit.read(UNITS / "snapshotter.service")
    service = unit["Service"]
    assert service["KillMode"] == "process"
    assert service["RuntimeDirectoryPreserve"] == "yes"
    own_namespace = {"PrivateTmp", "PrivateDevices", "PrivateMounts", "ProtectSystem"}
    assert not own_namespace & set(service)
    paths = default_paths()
    assert f"--root {paths.root} --run {paths.run}" in service["ExecStart"]
