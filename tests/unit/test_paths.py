"""Where things are, by user and environment."""

import os
from pathlib import Path

import pytest

from snapshotter.paths import default_paths


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in ("SNAPSHOTTER_ROOT", "SNAPSHOTTER_RUN", "XDG_DATA_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)


def test_root_uses_the_system_directories(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    paths = default_paths()
    assert (paths.root, paths.run) == (Path("/var/lib/snapshotter"), Path("/run/snapshotter"))


def test_others_use_their_own(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_DATA_HOME", "/home/u/.data")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    paths = default_paths()
    assert paths.root == Path("/home/u/.data/snapshotter")
    assert paths.run == Path("/run/user/1000/snapshotter")


def test_a_root_given_alone_keeps_its_sockets_to_itself(monkeypatch):
    assert default_paths("/a").run != default_paths("/b").run
    monkeypatch.setenv("SNAPSHOTTER_ROOT", "/env")
    assert default_paths().root == Path("/env")
    assert default_paths("/given").root == Path("/given")
    assert default_paths("/given", "/elsewhere").run == Path("/elsewhere")
