"""Kernel views on every way of mounting that we have, with plain directories for a gate."""

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from snapshotter.digest import sha256
from snapshotter.errors import SnapshotterError, UnavailableError
from snapshotter.kernel_view import mountinfo, syscalls
from snapshotter.kernel_view.probe import Abilities, probe
from snapshotter.names import ContentName
from snapshotter.paths import Paths, default_paths
from snapshotter.projection.image_writer import write_image
from snapshotter.projection.tree import Inode
from snapshotter.service import uppers, views
from snapshotter.service.control import MountRecord
from snapshotter.service.uppers import Upper, UpperRecord
from snapshotter.store import chunk_table
from tests.support.mounts import detach_all

pytestmark = pytest.mark.mount

CONTENT = b"some content\n"


def name_of(data: bytes) -> ContentName:
    return chunk_table.content_name([sha256(data)], len(data))


def put(paths: Paths, data: bytes) -> ContentName:
    """Makes an object of ``data``."""
    name = name_of(data)
    path = paths.objects / name.path
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return name


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[Paths]:
    """A root with plain directories where the gate would be: what is not an object is not there."""
    paths = default_paths(str(tmp_path / "root"))
    for directory in (
        paths.objects,
        paths.arrivals,
        paths.run,
        paths.gate / "g1",
        paths.gate / "v",
    ):
        directory.mkdir(parents=True)
    yield paths
    detach_all(tmp_path)


@pytest.fixture
def metadata(paths: Paths) -> ContentName:
    """The metadata image of one file with content that is here."""
    name = put(paths, CONTENT)
    root = Inode(stat.S_IFDIR | 0o751)
    assert root.children is not None
    root.children[b"file"] = Inode(
        stat.S_IFREG | 0o644, size=name.size, content=name.content_id, uid=7
    )
    return put(paths, bytes(write_image(root)))


WAYS = {
    "detached": {},
    "placed": {"detached_layers": False},
    "mount(2)": {"mount_api": False, "detached_layers": False},
    "loop device": {"erofs_file": False},
}


@pytest.fixture(params=list(WAYS))
def abilities(request: pytest.FixtureRequest, tmp_path: Path) -> Abilities:
    return replace(probe(tmp_path), **WAYS[request.param])


def make(paths: Paths, abilities: Abilities, metadata: str, *, upper: Upper | None = None) -> int:
    return views.make_view(
        paths,
        abilities,
        mount_id="m1",
        metadata=metadata,
        image_number=1,
        upper=upper,
        volatile=False,
        read_only=upper is None,
    )


def test_view_reads_objects_and_takes_writes(
    paths: Paths, abilities: Abilities, metadata: ContentName, tmp_path: Path
) -> None:
    images = views.MetadataMounts(paths, abilities)
    image = images.mount(metadata)
    assert images.mount(metadata) == image
    record = UpperRecord(metadata_image="sha256:" + "1" * 64, image="a")
    upper = uppers.prepare(tmp_path / "upper, : \\ it", record, image)
    descriptor = make(paths, abilities, image, upper=upper)
    images.close()  # views outlive the mounts that they were made from
    target = tmp_path / "target"
    target.mkdir()
    syscalls.move_mount(descriptor, target)
    os.close(descriptor)
    assert (target / "file").read_bytes() == CONTENT
    assert target.stat().st_mode & 0o7777 == 0o751
    (target / "file").chmod(0o600)
    (target / "new").write_text("written")
    assert (upper.upper / "new").read_text() == "written"
    assert (target / "file").stat().st_uid == 7
    line = mountinfo.mount_at(target)
    assert line is not None
    assert line.source == views.source_of("m1")
    assert "m1" in views.mounts_everywhere()
    assert [line for line in mountinfo.mounts() if str(paths.run) in line.target] == []


def test_read_only_view_needs_no_upper(
    paths: Paths, abilities: Abilities, metadata: ContentName
) -> None:
    images = views.MetadataMounts(paths, abilities)
    descriptor = make(paths, abilities, images.mount(metadata))
    file = Path(f"/proc/self/fd/{descriptor}/file")
    assert file.read_bytes() == CONTENT
    with pytest.raises(OSError, match="Read-only"):
        file.write_bytes(b"")
    os.close(descriptor)
    images.close()


def test_metadata_image_that_is_not_here_or_is_none_is_told(paths: Paths, tmp_path: Path) -> None:
    images = views.MetadataMounts(paths, probe(tmp_path))
    with pytest.raises(UnavailableError, match="pull the image again"):
        images.mount(name_of(b"absent"))
    with pytest.raises(SnapshotterError, match=r"mount metadata image .*Invalid argument"):
        images.mount(put(paths, bytes(8192)))
    with pytest.raises(SnapshotterError, match=r"mount the view: .*absent"):
        make(paths, probe(tmp_path), str(tmp_path / "absent"))


def test_kernel_tells_whether_an_upper_is_in_use(
    paths: Paths, metadata: ContentName, tmp_path: Path
) -> None:
    abilities = probe(tmp_path)
    images = views.MetadataMounts(paths, abilities)
    image = images.mount(metadata)
    record = UpperRecord(metadata_image="sha256:" + "1" * 64, image="a")
    upper = uppers.prepare(tmp_path / "upper", record, image)
    descriptor = make(paths, abilities, image, upper=upper)
    assert uppers.is_in_use(upper)  # though it stands in no namespace at all
    moved = tmp_path / "moved"
    (tmp_path / "upper").rename(moved)
    assert uppers.is_in_use(Upper(moved))
    os.close(descriptor)
    assert not uppers.is_in_use(Upper(moved))
    shutil.rmtree(moved)
    assert not uppers.is_in_use(Upper(moved))
    images.close()


ELSEWHERE = """
import sys, time
from snapshotter.kernel_view import syscalls
descriptor, target = int(sys.argv[1]), sys.argv[2]
syscalls.unshare(syscalls.CLONE_NEWNS)
syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
syscalls.move_mount(descriptor, target)
file = open(target + "/file")
print("placed", flush=True)
sys.stdin.readline()
"""


def test_view_in_another_namespace_is_found_and_refreshed(
    paths: Paths, metadata: ContentName, tmp_path: Path
) -> None:
    """A refresh drops unused names, so that an object that came later is found."""
    abilities = probe(tmp_path)
    images = views.MetadataMounts(paths, abilities)
    descriptor = make(paths, abilities, images.mount(metadata))
    device = os.fstat(descriptor).st_dev
    target = tmp_path / "target"
    target.mkdir()
    other = subprocess.Popen(
        [sys.executable, "-c", ELSEWHERE, str(descriptor), str(target)],
        pass_fds=[descriptor],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with other:
        os.close(descriptor)
        assert other.stdout is not None
        assert other.stdout.readline() == b"placed\n"
        assert not os.path.ismount(target)
        assert "m1" in views.mounts_everywhere()
        record = MountRecord(
            id="m1",
            image="a",
            image_number=1,
            view="kernel",
            upper=None,
            private_upper=False,
            read_only=True,
            created_at_s=0.0,
            device=device,
            target=str(target),
            pid=other.pid,
        )
        inside = f"/proc/{other.pid}/root{target}"
        views.refresh([record])
        assert Path(inside, "file").read_bytes() == CONTENT
        assert os.statvfs(inside).f_flag & os.ST_RDONLY
        assert other.stdin is not None
        other.stdin.close()
    assert "m1" not in views.mounts_everywhere()
    views.refresh([record])  # nothing there any more: nothing happens
    images.close()
