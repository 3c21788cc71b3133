"""The whole product through its command line, with a daemon and processes of its own."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mounts import detach_all, mounts_below

pytestmark = [pytest.mark.mount, pytest.mark.timeout(180)]

QUICKSTART = Path(__file__).parents[2] / "examples/quickstart.py"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    detach_all(tmp_path)


def test_it_prints_one_line_and_leaves_nothing(place: Path) -> None:
    done = subprocess.run(
        [sys.executable, QUICKSTART, place], capture_output=True, text=True, timeout=150
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = re.fullmatch(r"quickstart: 200 .*; ([\d.]+) of ([\d.]+) MiB fetched\n", done.stdout)
    assert found is not None, done.stdout
    assert float(found[1]) < float(found[2]) / 2
    assert mounts_below(place) == []
    assert list((place / "root/mounts").iterdir()) == []
    named = subprocess.run(["pgrep", "-f", str(place / "root")], capture_output=True, text=True)
    assert named.stdout == ""
