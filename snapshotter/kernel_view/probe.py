"""What this host can do for the kernel view, found by trying it on throw-away mounts.

Nothing that the probe makes is visible to others for longer than the probe, and all of it is
taken away again. It costs a few milliseconds; a daemon does it once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from snapshotter.kernel_view import loop_device, syscalls

_REDIRECT = b"/content"
_CONTENT = b"followed"
_CONTAINER_HINT = "put --root on a volume or disk (ext4, xfs, btrfs) instead"
_FS_NAMES = {
    syscalls.OVERLAY_MAGIC: "overlay",
    syscalls.TMPFS_MAGIC: "tmpfs",
    syscalls.FUSE_MAGIC: "fuse",
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was tried. ``needed`` says whether the kernel view fails without it."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    needed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What the kernel view goes by, with the findings behind it."""

    mount_api: bool
    """``lowerdir+`` and ``datadir+`` exist (6.8 and later); else mount(2) with one string."""
    detached_layers: bool
    """A mount that stands nowhere may be a layer; else it is placed below the run directory."""
    erofs_file: bool
    """EROFS reads an image file on the root's file system by itself; else a loop device."""
    findings: tuple[Finding, ...]
    self_contained: bool = False
    """With an upper, content is followed without metacopy, too (6.16 and later)."""

    @property
    def missing(self) -> list[Finding]:
        """What keeps the kernel view from working here; empty when it works."""
        return [finding for finding in self.findings if finding.needed and not finding.ok]


def probe(root: Path) -> Abilities:
    """Tries everything on the file system of ``root``, which must exist."""
    first = [_user(), _kernel(), _file_system(root)]
    if not first[0].ok:
        findings = (*first, _fuse(), *_timeouts())
        return Abilities(
            mount_api=False, detached_layers=False, erofs_file=False, findings=findings
        )
    scratch = Path(tempfile.mkdtemp(prefix=".probe-", dir=root))
    try:
        mount_api, detached, overlay = _overlay(scratch)
        erofs_file, erofs = _erofs(scratch)
        self_contained = _follows_without_metacopy(scratch)
        findings = (*first, *overlay, *erofs, _upper(scratch), _fuse(), *_timeouts())
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Abilities(
        mount_api=mount_api,
        detached_layers=detached,
        erofs_file=erofs_file,
        findings=findings,
        self_contained=self_contained,
    )


def _user() -> Finding:
    uid = os.geteuid()
    remedy = "run the daemon as root (this version has no view without root)"
    return Finding(name="root", ok=uid == 0, detail=f"uid {uid}", remedy="" if uid == 0 else remedy)


def _kernel() -> Finding:
    release = os.uname().release
    with contextlib.suppress(ValueError):
        major, minor = (int("".join(filter(str.isdigit, n))) for n in release.split(".")[:2])
        ok = (major, minor) >= (6, 5)
        remedy = "" if ok else "Linux 6.5 or later is needed (data-only lowers of overlayfs)"
        return Finding(name="kernel", ok=ok, detail=release, remedy=remedy, needed=False)
    detail = f"{release} (version not understood)"
    return Finding(name="kernel", ok=True, detail=detail, needed=False)


def _file_system(root: Path) -> Finding:
    magic = syscalls.fs_magic(root)
    name = _FS_NAMES.get(magic, f"magic {magic:#x}")
    return Finding(name="root's file system", ok=True, detail=f"{name} at {root}", needed=False)


def _overlay(scratch: Path) -> tuple[bool, bool, list[Finding]]:
    """Whether (the mount API has datadir+, layers may be detached), and the findings."""
    try:
        tmpfs = syscalls.make_mount("tmpfs", [("size", "64k"), ("mode", "700")])
    except OSError as error:
        remedy = "the daemon needs CAP_SYS_ADMIN and a seccomp policy that allows mounts"
        finding = Finding(name="mount", ok=False, detail=str(error), remedy=remedy)
        return False, False, [finding]
    place = scratch / "layers"
    place.mkdir()
    problem = "content of data-only lowers is not followed"
    try:
        _fill_layers(Path(f"/proc/self/fd/{tmpfs}"))
        for mount_api, detached, follows in _OVERLAY_TRIES:
            if not detached and not os.path.ismount(place):
                syscalls.move_mount(tmpfs, place)
            try:
                if follows(f"/proc/self/fd/{tmpfs}" if detached else str(place)):
                    return mount_api, detached, [_overlay_works(mount_api, detached)]
            except OSError as error:
                problem = str(error)
    finally:
        os.close(tmpfs)
        if os.path.ismount(place):
            syscalls.umount(place, syscalls.MNT_DETACH)
    remedy = "a kernel with overlayfs (modprobe overlay), 6.5 or later, is needed"
    return False, False, [Finding(name="overlay", ok=False, detail=problem, remedy=remedy)]


def _overlay_works(mount_api: bool, detached: bool) -> Finding:
    api = "datadir+ works" if mount_api else "by mount(2), no datadir+"
    layers = "detached layers work" if detached else "layers must be placed"
    return Finding(
        name="overlay", ok=True, detail=f"data-only lowers are followed; {api}; {layers}"
    )


def _fill_layers(base: Path) -> None:
    names, data = base / "names", base / "data"
    names.mkdir()
    data.mkdir()
    (data / "content").write_bytes(_CONTENT)
    file = names / "file"
    file.touch()
    os.truncate(file, len(_CONTENT))
    os.setxattr(file, "trusted.overlay.metacopy", b"")
    os.setxattr(file, "trusted.overlay.redirect", _REDIRECT)


def _follows_with_api(base: str) -> bool:
    options = [
        ("lowerdir+", f"{base}/names"),
        ("datadir+", f"{base}/data"),
        ("metacopy", "on"),
        ("redirect_dir", "follow"),
    ]
    view = syscalls.make_mount("overlay", options)
    try:
        return Path(f"/proc/self/fd/{view}/file").read_bytes() == _CONTENT
    finally:
        os.close(view)


def _follows_with_string(base: str) -> bool:
    target = Path(base).with_name("view")
    target.mkdir(exist_ok=True)
    data = f"lowerdir={base}/names::{base}/data,metacopy=on,redirect_dir=follow"
    syscalls.mount("overlay", target, "overlay", syscalls.MS_RDONLY, data)
    try:
        return (target / "file").read_bytes() == _CONTENT
    finally:
        syscalls.umount(target, syscalls.MNT_DETACH)


def _follows_without_metacopy(scratch: Path) -> bool:
    """Whether content is followed with an upper that holds none of the redirects itself."""
    base = scratch / "alone"
    target = base / "view"
    try:
        for directory in (base, target, base / "upper", base / "work"):
            directory.mkdir()
        _fill_layers(base)
        data = f"lowerdir={base}/names::{base}/data,upperdir={base}/upper,workdir={base}/work"
        syscalls.mount("overlay", target, "overlay", 0, f"{data},metacopy=off,redirect_dir=off")
        try:
            return (target / "file").read_bytes() == _CONTENT
        finally:
            syscalls.umount(target, syscalls.MNT_DETACH)
    except OSError:
        return False


_OVERLAY_TRIES: tuple[tuple[bool, bool, Callable[[str], bool]], ...] = (
    (True, True, _follows_with_api),
    (True, False, _follows_with_api),
    (False, False, _follows_with_string),
)
"""(the mount API is used, the layers are detached, the try), best first."""


def _erofs(scratch: Path) -> tuple[bool, list[Finding]]:
    """Whether EROFS reads files here. An empty file is refused for its content (EINVAL) if so."""
    image = scratch / "image"
    with image.open("wb") as file:
        file.truncate(8192)  # takes no space: the disk may be full
    try:
        os.close(syscalls.make_mount("erofs", [("source", str(image)), ("ro", None)]))
        problem = "an empty file was mounted"
    except OSError as error:
        if error.errno == errno.EINVAL:
            detail = "EROFS reads image files by itself"
            return True, [Finding(name="erofs", ok=True, detail=detail)]
        if error.errno == errno.ENODEV:
            remedy = "a kernel with EROFS (modprobe erofs) is needed"
            return False, [Finding(name="erofs", ok=False, detail=str(error), remedy=remedy)]
        problem = str(error)
    detail = f"EROFS reads no files on this file system ({problem}); loop devices are used"
    return False, [Finding(name="erofs", ok=True, detail=detail), _loop(image)]


def _loop(image: Path) -> Finding:
    try:
        descriptor, path = loop_device.attach(str(image))
    except OSError as error:
        remedy = f"allow loop devices (modprobe loop), or {_CONTAINER_HINT}"
        return Finding(name="loop device", ok=False, detail=str(error), remedy=remedy)
    os.close(descriptor)
    return Finding(name="loop device", ok=True, detail=path)


def _upper(scratch: Path) -> Finding:
    """Whether the root's file system can hold uppers: not overlayfs, with trusted xattrs."""
    for name in ("lower", "upper", "work"):
        (scratch / name).mkdir()
    data = f"lowerdir={scratch}/lower,upperdir={scratch}/upper,workdir={scratch}/work"
    target = scratch / "merged"
    target.mkdir()
    try:
        syscalls.mount("overlay", target, "overlay", 0, f"{data},metacopy=on,redirect_dir=on")
        (target / "new").touch()
        syscalls.umount(target, syscalls.MNT_DETACH)
    except OSError as error:
        return Finding(name="upper", ok=False, detail=str(error), remedy=_CONTAINER_HINT)
    return Finding(name="upper", ok=True, detail="the root's file system can hold uppers")


def _fuse() -> Finding:
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        remedy = "modprobe fuse, or give the container the device /dev/fuse"
        return Finding(name="fuse", ok=False, detail=str(error), remedy=remedy)
    return Finding(name="fuse", ok=True, detail="/dev/fuse opens")


def _timeouts() -> list[Finding]:
    """Request timeouts make the kernel abort the whole gate after one slow fetch."""
    findings = []
    for name in ("default_request_timeout", "max_request_timeout"):
        with contextlib.suppress(OSError, ValueError):  # older kernels have none
            value = int(Path(f"/proc/sys/fs/fuse/{name}").read_text())
            remedy = f"sysctl fs.fuse.{name}=0: a slow fetch would cut off every cold file"
            finding = Finding(
                name=f"fs.fuse.{name}",
                ok=value == 0,
                detail=str(value),
                remedy="" if value == 0 else remedy,
                needed=False,
            )
            findings.append(finding)
    return findings
