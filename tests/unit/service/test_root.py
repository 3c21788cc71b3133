import os
from pathlib import Path

import pytest

from snapshotter.errors import BusyError, CorruptError, UnsupportedError
from snapshotter.paths import LAYOUT_VERSION, default_paths
from snapshotter.service.root import open_root


def test_layout_is_made_for_this_user_alone(tmp_path: Path) -> None:
    paths = default_paths(str(tmp_path / "a" / "root"))
    os.close(open_root(paths))
    for directory in (paths.root, paths.run, paths.objects, paths.gate, paths.mounts):
        assert directory.stat().st_mode & 0o7777 == 0o700
    assert (paths.root / "version").read_text() == f"{LAYOUT_VERSION}\n"
    os.close(open_root(paths))  # and again


def test_second_daemon_is_told_who_has_the_root(tmp_path: Path) -> None:
    paths = default_paths(str(tmp_path))
    lock = open_root(paths)
    try:
        with pytest.raises(BusyError, match=f"daemon {os.getpid()} serves it already"):
            open_root(paths)
    finally:
        os.close(lock)


def test_newer_layout_is_refused_and_nothing_is_made(tmp_path: Path) -> None:
    (tmp_path / "version").write_text(f"{LAYOUT_VERSION + 1}\n")
    with pytest.raises(UnsupportedError, match="newer version"):
        open_root(default_paths(str(tmp_path)))
    assert not (tmp_path / "objects").exists()


def test_damaged_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "version").write_text("one")
    with pytest.raises(CorruptError, match="no layout version"):
        open_root(default_paths(str(tmp_path)))
