import os
from pathlib import Path

import pytest

from snapshotter.api.daemon import Daemon, image_name, view_request
from snapshotter.errors import InvalidInputError
from snapshotter.paths import Paths
from snapshotter.service import control
from tests.support.fake_daemon import FakeDaemon, make_image


def test_an_image_is_named_by_its_text_or_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/usr")
    assert image_name("debian:12") == "debian:12"
    assert image_name("oci:layout:v1") == "oci:/usr/layout:v1"
    assert image_name(make_image()) == "h" * 16


def test_a_view_is_asked_for_with_its_options(tmp_path: Path) -> None:
    request = view_request("x", {"upper": tmp_path, "view": "kernel", "platform": "linux/arm64"})
    assert (request.upper, request.view) == (os.path.realpath(tmp_path), "kernel")
    assert request.architecture == "arm64"
    with pytest.raises(InvalidInputError, match="read-only"):
        view_request("x", {"upper": tmp_path, "read_only": True})


def test_the_end_of_a_mount_may_be_known_or_nobody_be_there(tmp_path: Path) -> None:
    paths = Paths(tmp_path, tmp_path / "run")
    Daemon(paths, None).tell_end("x")
    with FakeDaemon(paths.control_socket) as daemon:
        daemon.answers[control.Unmounted] = control.Failed(code="not_found", message="none")
        Daemon(paths, None).tell_end("x")
        assert daemon.requests == [control.Unmounted(id="x")]
