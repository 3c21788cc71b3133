import json
from pathlib import Path

import pytest

from snapshotter.cli.cache import age_seconds
from snapshotter.digest import sha256
from snapshotter.errors import InvalidInputError
from snapshotter.names import ContentName
from snapshotter.service import control
from tests.support.fake_daemon import FakeDaemon, make_image
from tests.unit.cli.test_main import Run, daemon, run

__all__ = ["daemon", "run"]


def put(root: Path, body: bytes) -> ContentName:
    name = ContentName(sha256(body), len(body))
    path = root / "objects" / name.path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)
    return name


def test_ages() -> None:
    assert [age_seconds(text) for text in ("90s", "30m", "12h", "7d")] == [90, 1800, 43200, 604800]
    for text in ("", "7", "d", "-1d", "1.5h", "7 d", "9999999999d"):
        with pytest.raises(InvalidInputError, match="7d"):
            age_seconds(text)


def test_purge_asks_for_what_is_there_and_then_for_a_refresh(
    daemon: FakeDaemon, run: Run, tmp_path: Path
) -> None:
    names = sorted(str(put(tmp_path, body)) for body in (b"1", b"22"))
    daemon.answers[control.Evict] = control.Evicted(removed=1, freed_bytes=4096, kept=1)
    daemon.answers[control.Refresh] = control.Done()
    status, out, err = run("cache", "purge", "--json")
    assert (status, err) == (0, "")
    assert json.loads(out) == {"removed": 1, "freed_bytes": 4096, "kept": 1, "dry_run": False}
    (request,) = daemon.asked(control.Evict)
    assert isinstance(request, control.Evict)
    assert sorted(request.names) == names
    assert isinstance(daemon.requests[-1], control.Refresh)


def test_purge_of_nothing_in_a_dry_run_asks_for_nothing(
    daemon: FakeDaemon, run: Run, tmp_path: Path
) -> None:
    put(tmp_path, b"1")
    status, out, _ = run("cache", "purge", "--all", "--dry-run")
    assert (status, out) == (0, "1 contents would be removed, 4.0 KiB\n")
    assert run("cache", "purge", "--all", "--older-than", "1d")[0] == 2
    assert daemon.requests == []


def test_du_needs_no_daemon(run: Run, tmp_path: Path) -> None:
    put(tmp_path, b"1")
    status, out, err = run("cache", "du")
    assert (status, err) == (0, "")
    assert "Used by no image: 1, 4.0 KiB" in out
    assert json.loads(run("--json", "cache", "du")[1])["unused"] == {
        "contents": 1,
        "disk_bytes": 4096,
    }


def test_verify_says_what_is_corrupt(daemon: FakeDaemon, run: Run, tmp_path: Path) -> None:
    put(tmp_path, b"good")
    assert run("cache", "verify")[:2] == (0, "1 contents checked, 0 corrupt, 0 removed\n")
    bad = put(tmp_path, b"bad")
    (tmp_path / "objects" / bad.path).write_bytes(b"BAD")
    daemon.answers[control.Discard] = control.Discarded(names=[str(bad)])
    daemon.answers[control.Refresh] = control.Done()
    status, out, err = run("cache", "verify")
    assert status == 7
    assert f"{bad}: its bytes are not those of its name" in out
    assert "2 contents checked, 1 corrupt, 1 removed" in out
    assert "1 of 2" in err
    (request,) = daemon.asked(control.Discard)
    assert request == control.Discard(names=[str(bad)])


def test_images_is_a_list_and_a_group(daemon: FakeDaemon, run: Run) -> None:
    daemon.answers[control.ListImages] = control.Images(images=[make_image()])
    daemon.answers[control.RemoveImage] = control.Removed(
        image=make_image(), names=["demo:1"], whole=True
    )
    assert len(json.loads(run("images", "--json")[1])) == 1
    assert run("images", "rm", "demo:1")[:2] == (0, "image 1 removed: demo:1\n")
    assert json.loads(run("images", "rm", "--json", "demo:1", "--dry-run")[1])["dry_run"] is True
    assert daemon.requests[1:] == [
        control.RemoveImage(image="demo:1"),
        control.RemoveImage(image="demo:1", dry_run=True),
    ]
