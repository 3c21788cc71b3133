import os
from pathlib import Path

import pytest

from snapshotter.kernel_view import loop_device, syscalls
from snapshotter.kernel_view import probe as probe_module
from snapshotter.kernel_view.probe import probe

pytestmark = pytest.mark.mount


def mounted_below(root: Path) -> list[str]:
    return [
        line for line in Path("/proc/self/mounts").read_text().splitlines() if str(root) in line
    ]


def test_this_host_has_the_kernel_view_and_nothing_is_left(tmp_path: Path) -> None:
    abilities = probe(tmp_path)
    assert abilities.missing == []
    assert abilities.mount_api
    assert abilities.detached_layers
    assert abilities.erofs_file
    assert list(tmp_path.iterdir()) == []
    assert mounted_below(tmp_path) == []


@pytest.mark.parametrize(
    ("first", "mount_api"),
    [(1, True), (2, False)],
    ids=["layers must be placed", "no datadir+"],
)
def test_older_ways_work_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, mount_api: bool
) -> None:
    monkeypatch.setattr(probe_module, "_OVERLAY_TRIES", probe_module._OVERLAY_TRIES[first:])
    abilities = probe(tmp_path)
    assert abilities.missing == []
    assert (abilities.mount_api, abilities.detached_layers) == (mount_api, False)
    assert mounted_below(tmp_path) == []


def test_tmpfs_needs_a_loop_device(tmp_path: Path) -> None:
    syscalls.mount("none", tmp_path, "tmpfs")
    try:
        abilities = probe(tmp_path)
        assert not abilities.erofs_file
        assert {finding.name: finding.ok for finding in abilities.findings}["loop device"]
        assert list(tmp_path.iterdir()) == []
    finally:
        syscalls.umount(tmp_path, syscalls.MNT_DETACH)


def test_root_inside_an_overlay_is_told_where_to_go(tmp_path: Path) -> None:
    for name in ("lower", "upper", "work", "merged"):
        (tmp_path / name).mkdir()
    merged = tmp_path / "merged"
    data = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    syscalls.mount("overlay", merged, "overlay", 0, data)
    try:
        abilities = probe(merged)
        assert [finding.name for finding in abilities.missing] == ["upper"]
        assert "volume" in abilities.missing[0].remedy
    finally:
        syscalls.umount(merged, syscalls.MNT_DETACH)


def test_loop_device_reads_the_file_and_ends_by_itself(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(b"x" * 8192)
    descriptor, path = loop_device.attach(str(image))
    assert os.pread(descriptor, 4, 4096) == b"xxxx"
    backing = Path(f"/sys/block/{Path(path).name}/loop/backing_file")
    assert backing.read_text().strip() == str(image)
    os.close(descriptor)
