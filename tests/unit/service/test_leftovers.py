from pathlib import Path

import pytest
import structlog

from snapshotter.paths import Paths
from snapshotter.service.leftovers import clear_leftovers


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    paths = Paths(tmp_path / "root", tmp_path / "run")
    for directory in (paths.images, paths.run):
        directory.mkdir(parents=True)
    return paths


def test_what_was_left_half_done_goes_and_all_else_stays(paths: Paths) -> None:
    (paths.root / ".probe-x/upper/work").mkdir(parents=True)
    (paths.root / ".probe-x/image").write_bytes(b"x")
    (paths.run / ".view-y").mkdir()
    (paths.images / ".3.json.new").write_bytes(b"{")
    kept = [paths.images / "3.json", paths.root / ".hidden", paths.run / "store.sock"]
    for path in kept:
        path.write_bytes(b"kept")
    clear_leftovers(paths)
    left = [path for path in (*paths.root.rglob("*"), *paths.run.rglob("*")) if path.is_file()]
    assert sorted(left) == sorted(kept)
    assert not (paths.root / ".probe-x").exists()
    assert not (paths.run / ".view-y").exists()


def test_a_place_for_a_view_that_is_not_empty_is_not_emptied(paths: Paths) -> None:
    (paths.run / ".view-y").mkdir()
    (paths.run / ".view-y/file").write_bytes(b"somebody's")
    with structlog.testing.capture_logs() as logs:
        clear_leftovers(paths)
    assert (paths.run / ".view-y/file").exists()
    assert [entry["event"] for entry in logs] == ["leftover not removed"]
