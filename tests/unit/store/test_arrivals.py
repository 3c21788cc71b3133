"""The undo list: what a stop of the process or of the machine leaves behind."""

from __future__ import annotations

import errno
import os

import pytest

from snapshotter.digest import sha256
from snapshotter.names import ContentName
from snapshotter.paths import Paths
from snapshotter.store import arrivals as arrivals_module
from snapshotter.store.arrivals import Arrivals, read_boot_id, sync_file_system
from snapshotter.store.objects import Objects
from snapshotter.telemetry import Counters


class Opened:
    """ARRIVALS and OBJECTS as one start of the store has them."""

    def __init__(self, paths: Paths) -> None:
        self.paths = paths
        self.counters = Counters()
        self.arrivals = Arrivals(counters=self.counters)
        self.objects = Objects(paths, on_arrival=self.arrivals.note)
        self.has_rebooted = self.arrivals.recover(paths, self.objects)
        self.arrivals.note_boot(paths)

    def publish(self, body: bytes) -> ContentName:
        name = ContentName(sha256(body), len(body))
        self.objects.publish(name, body)
        return name

    def places(self, name: ContentName) -> str:
        """``o``, ``a``: where the name stands."""
        found = ("o", self.paths.objects), ("a", self.paths.arrivals)
        return "".join(letter for letter, path in found if (path / name.path).exists())


@pytest.fixture
def open_again(paths: Paths):
    opened: list[Opened] = []

    def start() -> Opened:
        opened.append(Opened(paths))
        return opened[-1]

    yield start
    for each in opened:
        each.objects.close()


@pytest.fixture
def reboot(monkeypatch: pytest.MonkeyPatch):
    return lambda: monkeypatch.setattr(arrivals_module, "read_boot_id", lambda: "another boot")


def test_boot_id_stays_the_same() -> None:
    assert read_boot_id() == read_boot_id() != ""


def test_what_is_young_is_settled_by_the_second_call(open_again) -> None:
    store = open_again()
    first = store.publish(b"1")
    store.arrivals.settle_ripe(store.objects)
    second = store.publish(b"2")
    assert store.places(first) == "oa"
    store.arrivals.settle_ripe(store.objects)
    assert (store.places(first), store.places(second)) == ("o", "oa")
    assert not store.arrivals.is_empty
    store.arrivals.settle_ripe(store.objects)
    assert store.places(second) == "o"
    assert store.arrivals.is_empty
    assert store.counters.snapshot()["arrivals_settled"] == 2


def test_settling_all_takes_the_young_too(open_again) -> None:
    store = open_again()
    names = [store.publish(b"1")]
    store.arrivals.settle_ripe(store.objects)
    names.append(store.publish(b"2"))
    store.arrivals.settle_all(store.objects)
    assert [store.places(name) for name in names] == ["o", "o"]


def test_names_are_dropped_only_after_a_sync_that_worked(
    open_again, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_again()
    name = store.publish(b"1")

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "broken disk")

    with monkeypatch.context() as patched:
        patched.setattr(arrivals_module, "sync_file_system", fail)
        with pytest.raises(OSError, match="broken disk"):
            store.arrivals.settle_all(store.objects)
    assert store.places(name) == "oa"
    store.arrivals.settle_ripe(store.objects)
    assert store.places(name) == "o"


def test_syncing_a_closed_descriptor_is_an_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    os.close(writing)
    with pytest.raises(OSError, match="Bad file descriptor"):
        sync_file_system(reading)


def test_after_the_machine_went_down_arrivals_are_undone(open_again, reboot) -> None:
    store = open_again()
    settled = store.publish(b"settled")
    store.arrivals.settle_all(store.objects)
    torn = store.publish(b"torn")
    reboot()
    again = open_again()
    assert again.has_rebooted
    assert (again.places(settled), again.places(torn)) == ("o", "")
    assert again.counters.snapshot()["arrivals_undone"] == 1
    assert not open_again().has_rebooted


def test_after_the_process_died_everything_is_kept_and_settled_later(open_again) -> None:
    name = open_again().publish(b"1")
    again = open_again()
    assert not again.has_rebooted
    assert again.places(name) == "oa"
    again.arrivals.settle_all(again.objects)
    assert again.places(name) == "o"


def test_a_death_between_the_two_links_is_completed(open_again) -> None:
    store = open_again()
    name = store.publish(b"1")
    os.unlink(store.paths.objects / name.path)
    assert open_again().places(name) == "oa"


def test_an_undo_that_was_cut_short_is_taken_up_again(
    open_again, reboot, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_again()
    names = [store.publish(body) for body in (b"1", b"2", b"3")]
    reboot()
    for fails_at in range(1, 7):
        calls = 0
        real = os.unlink

        def unlink(path: str, *, dir_fd: int, fails_at=fails_at, real=real) -> None:
            nonlocal calls
            calls += 1
            if calls == fails_at:
                raise KeyboardInterrupt
            real(path, dir_fd=dir_fd)

        with monkeypatch.context() as patched:
            patched.setattr(arrivals_module.os, "unlink", unlink)
            try:
                open_again()
            except KeyboardInterrupt:
                pass
        # Never an object without its undo entry before all is done.
        assert all("a" in store.places(name) for name in names if "o" in store.places(name))
    assert open_again() is not None
    assert [store.places(name) for name in names] == ["", "", ""]
