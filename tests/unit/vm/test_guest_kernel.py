from __future__ import annotations

from pathlib import Path

import pytest

from snapshotter.errors import NotFoundError, UnavailableError, UnsupportedError
from snapshotter.vm import debian_kernel, guest_kernel


def make_kernel(kernels: Path, release: str) -> None:
    (kernels / release / "modules").mkdir(parents=True)
    (kernels / release / "vmlinuz").touch()


def test_the_newest_kernel_is_found(tmp_path: Path) -> None:
    for release in ("6.12.9-cloud-amd64", "6.12.117+deb13-cloud-amd64", "6.1.200-cloud-amd64"):
        make_kernel(tmp_path, release)
    found = guest_kernel.find(tmp_path)
    assert found.release == "6.12.117+deb13-cloud-amd64"
    assert found.version == (6, 12)


def test_none_is_an_error_that_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="snapshotter vm setup"):
        guest_kernel.find(tmp_path, host=False)
    with pytest.raises(NotFoundError, match="does not exist"):
        guest_kernel.named(tmp_path / "vmlinuz", None)
    make_kernel(tmp_path, "1")
    with pytest.raises(NotFoundError, match="is no directory"):
        guest_kernel.named(tmp_path / "1/vmlinuz", tmp_path / "2")


def test_a_kernel_of_unknown_release_has_no_version(tmp_path: Path) -> None:
    (tmp_path / "bzImage").touch()
    assert guest_kernel.named(tmp_path / "bzImage", None).version == (0, 0)


def test_an_initramfs_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_kernel(tmp_path / "kernels", "6.12.9-cloud-amd64")
    kernel = guest_kernel.find(tmp_path / "kernels")
    (tmp_path / "kernels/6.12.9-cloud-amd64/modules/erofs.ko").write_bytes(b"depends=\0")
    made = guest_kernel.initramfs_of(kernel, ["erofs"], tmp_path / "cache")
    assert b"00-erofs.ko" in made
    monkeypatch.setattr(guest_kernel, "base_archive", None)
    assert guest_kernel.initramfs_of(kernel, ["erofs"], tmp_path / "cache") == made


def test_a_busybox_that_needs_libraries_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnsupportedError, match="apt-get install busybox-static"):
        guest_kernel.busybox()
    (tmp_path / "busybox").write_bytes(b"\x7fELF /lib64/ld-linux-x86-64.so.2\0")
    (tmp_path / "busybox").chmod(0o755)
    with pytest.raises(UnsupportedError, match="needs libraries"):
        guest_kernel.busybox()


def test_an_archive_that_cannot_be_reached_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="fetch a guest kernel"):
        debian_kernel.fetch(tmp_path / "kernels", mirror="http://127.0.0.1:9/debian")
    assert not list((tmp_path / "kernels").iterdir())


def test_a_host_without_apt_is_told_what_to_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnsupportedError, match="--kernel"):
        debian_kernel.fetch(tmp_path / "kernels")
