"""Publishing objects: whole or not at all, whatever step fails."""

from __future__ import annotations

import errno
import os
import stat
import threading

import pytest

from snapshotter.digest import sha256
from snapshotter.errors import DiskFullError
from snapshotter.names import ContentName
from snapshotter.paths import Paths
from snapshotter.store import objects as objects_module
from snapshotter.store.objects import FAN_OUT, Objects, disk_errors, write_whole

BODY = b"content"
NAME = ContentName(sha256(BODY), len(BODY))


@pytest.fixture
def arrived() -> list[str]:
    return []


@pytest.fixture
def objects(paths: Paths, arrived: list[str]):
    opened = Objects(paths, on_arrival=arrived.append)
    yield opened
    opened.close()


def test_directories_are_private_and_complete(paths: Paths, objects: Objects) -> None:
    for directory in (paths.objects, paths.arrivals):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert {entry.name for entry in directory.iterdir()} >= set(FAN_OUT)


def test_an_object_is_one_read_only_file_under_both_names(
    paths: Paths, objects: Objects, arrived: list[str]
) -> None:
    assert not objects.has(NAME)
    objects.publish(NAME, BODY)
    there, arrival = paths.objects / NAME.path, paths.arrivals / NAME.path
    assert there.read_bytes() == BODY
    assert there.samefile(arrival)
    assert stat.S_IMODE(there.stat().st_mode) == 0o444
    assert objects.has(NAME)
    assert arrived == [NAME.path]


def test_publishing_again_is_success(paths: Paths, objects: Objects) -> None:
    objects.publish(NAME, BODY)
    objects.publish(NAME, BODY)
    os.unlink(paths.arrivals / NAME.path)
    objects.publish(NAME, BODY)
    assert (paths.objects / NAME.path).read_bytes() == BODY


def test_an_object_in_arrivals_alone_is_had_and_opened(paths: Paths, objects: Objects) -> None:
    objects.publish(NAME, BODY)
    os.unlink(paths.objects / NAME.path)
    assert objects.has(NAME)
    descriptor = objects.open(NAME)
    assert os.read(descriptor, 100) == BODY
    os.close(descriptor)
    os.unlink(paths.arrivals / NAME.path)
    with pytest.raises(FileNotFoundError):
        objects.open(NAME)


@pytest.mark.parametrize("call", ["open", "pwrite", "rename", "link"])
def test_a_failing_step_leaves_nothing_torn(
    paths: Paths, objects: Objects, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(objects_module.os, call, fail)
        with pytest.raises(OSError, match="No space"):
            objects.publish(NAME, BODY)
    assert os.listdir(paths.arrivals / "tmp") == []
    assert not (paths.objects / NAME.path).exists()
    if call == "link":  # the undo list has a whole object: nothing is wrong with it
        assert (paths.arrivals / NAME.path).read_bytes() == BODY
    else:
        assert not objects.has(NAME)
    objects.publish(NAME, BODY)
    assert (paths.objects / NAME.path).read_bytes() == BODY


def test_short_writes_are_continued(
    paths: Paths, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    monkeypatch.setattr(
        objects_module.os, "pwrite", lambda fd, data, at: real(fd, bytes(data)[:3], at)
    )
    objects.publish(NAME, BODY)
    assert (paths.objects / NAME.path).read_bytes() == BODY


def test_writing_at_an_offset(tmp_path) -> None:
    descriptor = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    write_whole(descriptor, bytearray(b"xyz"), 5)
    assert os.pread(descriptor, 100, 0) == b"\0" * 5 + b"xyz"
    os.close(descriptor)


def test_threads_may_publish_the_same_object_at_once(paths: Paths, objects: Objects) -> None:
    def publish() -> None:
        for _ in range(50):
            objects.publish(NAME, BODY)

    threads = [threading.Thread(target=publish) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (paths.objects / NAME.path).read_bytes() == BODY
    assert os.listdir(paths.arrivals / "tmp") == []


def test_a_start_removes_leftover_temporary_files(paths: Paths, objects: Objects) -> None:
    temporary, descriptor = objects.make_temporary()
    os.close(descriptor)
    assert os.listdir(paths.arrivals / "tmp") == [temporary]
    Objects(paths, on_arrival=lambda _: None).close()
    assert os.listdir(paths.arrivals / "tmp") == []


def test_linking_a_file_makes_it_an_object_without_a_copy(paths: Paths, objects: Objects) -> None:
    source = paths.root / "source"
    source.write_bytes(BODY)
    directory_fd = os.open(paths.root, os.O_RDONLY)
    for _ in range(2):
        objects.link(NAME, "source", directory_fd)
    os.close(directory_fd)
    assert (paths.objects / NAME.path).samefile(source)


def test_disk_errors_name_the_operation_and_the_way_out() -> None:
    refused = pytest.raises(DiskFullError, match=r"publish x: No space.*free some space")
    with refused, disk_errors("publish x"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
