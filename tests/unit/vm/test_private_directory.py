from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from snapshotter.vm.private_directory import private_directory

HOLD = """
import sys, pathlib
from snapshotter.vm.private_directory import private_directory
with private_directory(pathlib.Path(sys.argv[1]), "d-") as directory:
    (directory / "file").touch()
    print(directory, flush=True)
    sys.stdin.read()
"""


def test_it_is_there_and_then_gone(tmp_path: Path) -> None:
    with private_directory(tmp_path / "parent", "d-") as directory:
        assert directory.stat().st_mode & 0o777 == 0o700
        (directory / "sub").mkdir()
    assert not list((tmp_path / "parent").glob("d-*"))


def test_what_a_killed_process_left_is_removed_and_what_lives_is_not(tmp_path: Path) -> None:
    words = [sys.executable, "-c", HOLD, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, **pipes) as killed, subprocess.Popen(words, **pipes) as living:  # type: ignore[call-overload]
        assert killed.stdout is not None
        assert living.stdout is not None
        left = Path(killed.stdout.readline().strip())
        kept = Path(living.stdout.readline().strip())
        (tmp_path / "d-file").touch()
        killed.kill()
        killed.wait()
        assert left.exists()
        with private_directory(tmp_path, "d-"):
            assert not left.exists()
            assert (kept / "file").exists()
        living.communicate("")
    assert not kept.exists()
    assert (tmp_path / "d-file").exists()
