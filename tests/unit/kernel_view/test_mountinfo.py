import os
from pathlib import Path

from snapshotter.kernel_view.mountinfo import MountLine, mount_at, mounts, parse, sources_everywhere

LINE = b"43 27 0:40 / /a\\040b\\134c ro,nosuid shared:3 - fuse.x s\\040rc ro,user_id=0\n"


def test_targets_and_sources_are_unescaped() -> None:
    assert parse(LINE) == [MountLine(os.makedev(0, 40), "/a b\\c", "fuse.x", "s rc")]


def test_directory_that_a_bind_shows_is_told() -> None:
    (line,) = parse(LINE.replace(b" / /a", b" /what/was\\040bound /a"))
    assert line.root == "/what/was bound"


def test_lines_that_are_none_are_left_out() -> None:
    assert parse(b"\nnot a line\n43 27 0:40 - x y\n" + LINE) == parse(LINE)


def test_this_process_sees_its_root() -> None:
    root = next(line for line in mounts() if line.target == "/")
    assert root.source in sources_everywhere()


def test_topmost_mount_is_found_and_only_at_its_very_target() -> None:
    assert mount_at(Path("/proc")) is not None
    assert mount_at(Path("/proc/self")) is None
