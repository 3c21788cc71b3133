import os
from pathlib import Path

import pytest

from snapshotter.errors import CorruptError, InvalidInputError
from snapshotter.service import uppers
from snapshotter.service.uppers import UpperRecord

MINE = UpperRecord(metadata_image="sha256:" + "11" * 32, image="a:1")
OTHER = UpperRecord(metadata_image="sha256:" + "22" * 32, image="b:2")


@pytest.fixture
def image_root(tmp_path: Path) -> str:
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(0o1751)
    os.setxattr(root, "user.label", b"x")
    os.utime(root, ns=(5, 1_700_000_000_123_456_789))
    return str(root)


def test_new_upper_looks_like_the_root_of_the_image(tmp_path: Path, image_root: str) -> None:
    upper = uppers.prepare(tmp_path / "a" / "u", MINE, image_root)
    status = upper.upper.stat()
    assert (status.st_mode & 0o7777, status.st_mtime_ns) == (0o1751, 1_700_000_000_123_456_789)
    assert os.getxattr(upper.upper, "user.label") == b"x"
    assert upper.work.is_dir()


def test_upper_is_used_again_over_its_image_and_refused_over_another(
    tmp_path: Path, image_root: str
) -> None:
    directory = tmp_path / "u"
    (uppers.prepare(directory, MINE, image_root).upper / "file").write_text("kept")
    again = uppers.prepare(directory, MINE, image_root)
    assert (again.upper / "file").read_text() == "kept"
    with pytest.raises(InvalidInputError, match=r"made over a:1 .* over b:2"):
        uppers.prepare(directory, OTHER, image_root)


def test_directory_that_is_no_upper_is_left_alone(tmp_path: Path, image_root: str) -> None:
    (tmp_path / "u").mkdir()
    (tmp_path / "u" / "letters").touch()
    with pytest.raises(InvalidInputError, match="not empty"):
        uppers.prepare(tmp_path / "u", MINE, image_root)
    assert os.listdir(tmp_path / "u") == ["letters"]
    with pytest.raises(InvalidInputError, match="not a directory"):
        uppers.prepare(tmp_path / "u" / "letters", MINE, image_root)


def test_relative_upper_is_refused(image_root: str) -> None:
    with pytest.raises(InvalidInputError, match="absolute"):
        uppers.prepare(Path("u"), MINE, image_root)


@pytest.mark.parametrize("raw", [b"{}", b'{"x":' + b"[" * 9999, b'{"image":"\xff"}'])
def test_damaged_record_is_told(tmp_path: Path, image_root: str, raw: bytes) -> None:
    upper = uppers.prepare(tmp_path / "u", MINE, image_root)
    (upper.directory / "upper.json").write_bytes(raw)
    with pytest.raises(CorruptError, match="not known any more"):
        uppers.prepare(tmp_path / "u", MINE, image_root)


def test_upper_after_a_volatile_crash_is_refused_until_it_is_ended(
    tmp_path: Path, image_root: str
) -> None:
    upper = uppers.prepare(tmp_path / "u", MINE, image_root)
    upper.volatile_mark.mkdir(parents=True)
    (upper.volatile_mark / "dirty").touch()  # as the kernel leaves it
    with pytest.raises(InvalidInputError, match="torn"):
        uppers.prepare(tmp_path / "u", MINE, image_root)
    uppers.end_volatile(upper)
    assert uppers.prepare(tmp_path / "u", MINE, image_root) == upper


def test_upper_whose_making_was_cut_off_is_completed(
    tmp_path: Path, image_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("cut off")

    with monkeypatch.context() as patch:
        patch.setattr(uppers, "copy_attributes", fail)
        with pytest.raises(OSError, match="cut off"):
            uppers.prepare(tmp_path / "u", MINE, image_root)
    assert uppers.prepare(tmp_path / "u", MINE, image_root).upper.is_dir()
