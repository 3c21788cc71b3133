"""Messages of containerd's API against their wire form, written out by hand."""

from snapshotter.containerd import messages
from snapshotter.containerd.messages import MESSAGES, METHODS, new


def test_a_request_is_written_as_protobuf_says():
    request = new("PrepareSnapshotRequest", snapshotter="s", key="k", labels={"a": "b"})

    assert request.SerializeToString() == (
        b"\x0a\x01s"  # 1: "s"
        b"\x12\x01k"  # 2: "k"
        b"\x22\x06\x0a\x01a\x12\x01b"  # 4: an entry of a map, 1: "a", 2: "b"
    )


def test_nested_and_repeated_fields_are_read():
    raw = (
        b"\x0a\x13\x0a\x07overlay\x12\x02sn\x22\x01a\x22\x01b"  # 1: a mount with two options
        b"\x0a\x04\x0a\x02fs"  # 1: another
    )
    mounts = MESSAGES["MountsResponse"].FromString(raw).mounts

    assert [(each.type, each.source, list(each.options)) for each in mounts] == [
        ("overlay", "sn", ["a", "b"]),
        ("fs", "", []),
    ]


def test_times_before_1970_are_kept():
    info = new("SnapshotInfo", created_at=new("Timestamp", seconds=-62135596800))

    read = MESSAGES["SnapshotInfo"].FromString(info.SerializeToString())

    assert read.created_at.seconds == -62135596800


def test_fields_that_are_not_in_the_table_are_passed_over():
    assert MESSAGES["StatSnapshotRequest"].FromString(b"\x12\x01k\x7a\x01x").key == "k"


def test_every_method_has_its_messages():
    for service in METHODS.values():
        for method in service.values():
            assert method.request in MESSAGES
            assert method.response in MESSAGES


def test_the_snapshots_service_is_whole():
    assert len(METHODS[messages.SNAPSHOTS]) == 10
