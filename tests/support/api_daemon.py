"""A fake daemon whose views are real and independent: for tests of the Python surface."""

import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotter.kernel_view import syscalls
from snapshotter.service import control
from tests.support.fake_daemon import FakeDaemon, make_image, make_record, view_of_host


@pytest.fixture
def upper(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "upper"
    directory.mkdir()
    syscalls.mount("tmpfs", directory, "tmpfs")
    try:
        yield directory
    finally:
        syscalls.umount(directory, syscalls.MNT_DETACH)


@pytest.fixture
def daemon(tmp_path: Path, upper: Path) -> Iterator[FakeDaemon]:
    numbers = itertools.count(1)
    views: dict[int, int] = {}  # by the thread that serves a connection

    def make_view(_: object) -> control.Mounted:
        place = upper / str(next(numbers))
        place.mkdir()
        views[threading.get_ident()] = view = view_of_host(place)()
        record = make_record(device=os.fstat(view).st_dev)
        image = make_image(env={"FROM": "image"})
        return control.Mounted(mount=record, image=image, reason="it works")

    with FakeDaemon(tmp_path / "run/control.sock") as running:
        running.answers[control.Mount] = make_view
        running.view = lambda: views.pop(threading.get_ident())
        yield running
