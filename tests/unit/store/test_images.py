"""Image records on disk."""

import pytest

from snapshotter.cache_v1.protocol import Layer, MetadataImage, Prepared, Totals
from snapshotter.errors import CorruptError
from snapshotter.store import images


def record(number: int) -> images.ImageRecord:
    prepared = Prepared(
        image_handle=f"handle-{number}",
        metadata_generation="1",
        digest="sha256:" + "1" * 64,
        architecture="amd64",
        env={"PATH": "/bin"},
        entrypoint=None,
        cmd=["/bin/sh"],
        config="{}",
        totals=Totals(files=2, bytes=3),
        layers=[
            Layer(
                digest="sha256:d", diff_id="sha256:i", chain_id="sha256:c", size=9, media_type="m"
            )
        ],
        metadata_image=MetadataImage(content="sha256:" + "2" * 64, size=4096),
    )
    return images.ImageRecord(
        number=number, references=["docker://h/n:t"], pulled_at_s=1.5, prepared=prepared
    )


def test_records_are_found_again_in_order(tmp_path):
    for number in (10, 2):
        images.save(tmp_path, record(number))
    assert images.load(tmp_path, 2) == record(2)
    assert images.load_all(tmp_path) == [record(2), record(10)]


def test_no_record_is_none(tmp_path):
    assert images.load(tmp_path, 1) is None


@pytest.mark.parametrize(
    "raw", [b'{"number": 3', b'{"x":' + b"[" * 9999, b'{"references":["\xff"]}']
)
def test_a_torn_record_names_its_file(tmp_path, raw):
    (tmp_path / "3.json").write_bytes(raw)
    images.save(tmp_path, record(4))
    with pytest.raises(CorruptError, match=r"3\.json"):
        images.load(tmp_path, 3)
    assert images.load_all(tmp_path) == [record(4)]


def test_a_half_written_replacement_is_not_seen(tmp_path):
    images.save(tmp_path, record(1))
    (tmp_path / ".1.json.new").write_bytes(b"{")
    assert images.load_all(tmp_path) == [record(1)]


def test_a_removed_record_is_gone_and_its_number_is_not_given_again(tmp_path):
    for number in (1, 2):
        images.save(tmp_path, record(number))
    assert images.last_number(tmp_path) == 2
    images.remove(tmp_path, 2)
    images.remove(tmp_path, 1)
    assert images.load_all(tmp_path) == []
    assert images.last_number(tmp_path) == 2
    (tmp_path / "last-number").write_text("?")
    with pytest.raises(CorruptError, match="last-number"):
        images.last_number(tmp_path)
