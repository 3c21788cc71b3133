from pathlib import Path

import msgspec
import pytest

from snapshotter.service.control import MountRecord
from snapshotter.service.mounting import _clear_up, _degraded
from snapshotter.service.mounts import StoredMount, boot_id
from snapshotter.service.uppers import Upper


def stored(upper: Path, boot: str, *, private: bool = False) -> StoredMount:
    mount = MountRecord(
        id="m1",
        image="a",
        image_number=1,
        view="kernel",
        upper=str(upper),
        private_upper=private,
        read_only=False,
        created_at_s=0.0,
        device=1,
    )
    return StoredMount(mount=mount, boot=boot, gate_device=1, volatile=True, owner_started=None)


@pytest.fixture
def upper(tmp_path: Path) -> Upper:
    """One that a volatile mount has used."""
    upper = Upper(tmp_path / "upper")
    upper.upper.mkdir(parents=True)
    upper.volatile_mark.mkdir(parents=True)
    return upper


@pytest.fixture
def gone(tmp_path: Path) -> Path:
    """The directory of the dropped record."""
    gone = tmp_path / ".gone-m1"
    gone.mkdir()
    (gone / "mount.json").touch()
    return gone


def test_volatile_upper_from_before_a_reboot_keeps_its_mark(upper: Upper, gone: Path) -> None:
    _clear_up(stored(upper.directory, "an earlier boot"), gone)
    assert upper.volatile_mark.exists()
    assert not gone.exists()


@pytest.mark.mount
def test_volatile_upper_is_usable_after_a_clean_end(upper: Upper, gone: Path) -> None:
    _clear_up(stored(upper.directory, boot_id()), gone)
    assert not upper.volatile_mark.exists()
    assert upper.upper.exists()
    assert not gone.exists()


@pytest.mark.mount
def test_private_upper_goes_with_its_record(gone: Path) -> None:
    Upper(gone).upper.mkdir()
    (Upper(gone).upper / "file").touch()
    _clear_up(stored(gone.with_name("m1"), "an earlier boot", private=True), gone)
    assert not gone.exists()


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"upper": None}, "mount it again"),
        ({"private_upper": True}, "copy that out first"),
        ({}, "mount it again with --upper /work/7"),
    ],
)
def test_a_view_without_gate_says_how_it_is_mended(changes: dict[str, object], remedy: str) -> None:
    mount = stored(Path("/work/7"), boot_id()).mount
    said = _degraded(msgspec.structs.replace(mount, **changes))
    assert said.startswith("its gate is gone")
    assert said.endswith(remedy)
