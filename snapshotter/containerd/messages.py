"""Messages of containerd's gRPC API, from a table of our own.

Only field numbers and types travel, so the table is all there is to know: from it descriptors are
built at run time, in a pool of their own, for whatever protobuf is installed. Field numbers:
containerd's api/services/*/v1 and api/types, the same from 1.6 to 2.x unless said.

A row is ``number name type`` for each field. Types: ``s`` string, ``y`` bytes, ``b`` bool, ``i``
int32 (and every enum), ``l`` int64, ``u`` uint64, ``m`` a map of strings, else a message of the
table; ``*`` behind it means repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "snapshotter.containerd"
_MESSAGES = {
    # google.protobuf's, by their wire form
    "Empty": "",
    "Timestamp": "1 seconds l, 2 nanos i",
    "FieldMask": "1 paths s*",
    "Any": "1 type_url s, 2 value y",
    "Status": "1 code i, 2 message s, 3 details Any*",
    # api/types
    "Mount": "1 type s, 2 source s, 3 target s, 4 options s*",
    "Descriptor": "1 media_type s, 2 digest s, 3 size l, 5 annotations m",
    "Platform": "1 os s, 2 architecture s, 3 variant s",
    # snapshots
    "PrepareSnapshotRequest": "1 snapshotter s, 2 key s, 3 parent s, 4 labels m",
    "PrepareSnapshotResponse": "1 mounts Mount*",
    "ViewSnapshotRequest": "1 snapshotter s, 2 key s, 3 parent s, 4 labels m",
    "ViewSnapshotResponse": "1 mounts Mount*",
    "MountsRequest": "1 snapshotter s, 2 key s",
    "MountsResponse": "1 mounts Mount*",
    "RemoveSnapshotRequest": "1 snapshotter s, 2 key s",
    "CommitSnapshotRequest": "1 snapshotter s, 2 name s, 3 key s, 4 labels m, 5 parent s",
    "StatSnapshotRequest": "1 snapshotter s, 2 key s",
    "SnapshotInfo": "1 name s, 2 parent s, 3 kind i, 4 created_at Timestamp, "
    "5 updated_at Timestamp, 6 labels m",
    "StatSnapshotResponse": "1 info SnapshotInfo",
    "UpdateSnapshotRequest": "1 snapshotter s, 2 info SnapshotInfo, 3 update_mask FieldMask",
    "UpdateSnapshotResponse": "1 info SnapshotInfo",
    "ListSnapshotsRequest": "1 snapshotter s, 2 filters s*",
    "ListSnapshotsResponse": "1 info SnapshotInfo*",
    "UsageRequest": "1 snapshotter s, 2 key s",
    "UsageResponse": "1 size l, 2 inodes l",
    "CleanupRequest": "1 snapshotter s",
    # leases
    "Lease": "1 id s, 2 created_at Timestamp, 3 labels m",
    "CreateLeaseRequest": "1 id s, 3 labels m",
    "CreateLeaseResponse": "1 lease Lease",
    "DeleteLeaseRequest": "1 id s, 2 sync b",
    "ListLeasesRequest": "1 filters s*",
    "ListLeasesResponse": "1 leases Lease*",
    # content
    "ContentInfo": "1 digest s, 2 size l, 3 created_at Timestamp, 4 updated_at Timestamp, "
    "5 labels m",
    "ContentInfoRequest": "1 digest s",
    "ContentInfoResponse": "1 info ContentInfo",
    "UpdateContentRequest": "1 info ContentInfo, 2 update_mask FieldMask",
    "UpdateContentResponse": "1 info ContentInfo",
    "ListContentRequest": "1 filters s*",
    "ListContentResponse": "1 info ContentInfo*",
    "DeleteContentRequest": "1 digest s",
    "ReadContentRequest": "1 digest s, 2 offset l, 3 size l",
    "ReadContentResponse": "1 offset l, 2 data y",
    "WriteContentRequest": "1 action i, 2 ref s, 3 total l, 4 expected s, 5 offset l, 6 data y, "
    "7 labels m",
    "WriteContentResponse": "1 action i, 2 started_at Timestamp, 3 updated_at Timestamp, "
    "4 offset l, 5 total l, 6 digest s",
    "AbortRequest": "1 ref s",
    # images
    "Image": "1 name s, 2 labels m, 3 target Descriptor, 7 created_at Timestamp, "
    "8 updated_at Timestamp",
    "GetImageRequest": "1 name s",
    "GetImageResponse": "1 image Image",
    "ListImagesRequest": "1 filters s*",
    "ListImagesResponse": "1 images Image*",
    "CreateImageRequest": "1 image Image",
    "CreateImageResponse": "1 image Image",
    "UpdateImageRequest": "1 image Image, 2 update_mask FieldMask",
    "UpdateImageResponse": "1 image Image",
    "DeleteImageRequest": "1 name s, 2 sync b",
    # containers
    "Runtime": "1 name s, 2 options Any",
    "Container": "1 id s, 2 labels m, 3 image s, 4 runtime Runtime, 5 spec Any, 6 snapshotter s, "
    "7 snapshot_key s, 8 created_at Timestamp, 9 updated_at Timestamp",
    "ListContainersRequest": "1 filters s*",
    "ListContainersResponse": "1 containers Container*",
    # diff
    "ApplyRequest": "1 diff Descriptor, 2 mounts Mount*",
    "ApplyResponse": "1 applied Descriptor",
    # namespaces
    "Namespace": "1 name s, 2 labels m",
    "ListNamespacesRequest": "1 filter s",
    "ListNamespacesResponse": "1 namespaces Namespace*",
    # introspection and version
    "PluginsRequest": "1 filters s*",
    "Plugin": "1 type s, 2 id s, 3 requires s*, 4 platforms Platform*, 5 exports m, "
    "6 capabilities s*, 7 init_err Status",
    "PluginsResponse": "1 plugins Plugin*",
    "VersionResponse": "1 version s, 2 revision s",
}


@dataclass(frozen=True, slots=True)
class Method:
    """What a method takes and gives, by names of the table, and which side streams."""

    request: str
    response: str
    streams_requests: bool = False
    streams_responses: bool = False


SNAPSHOTS = "containerd.services.snapshots.v1.Snapshots"
LEASES = "containerd.services.leases.v1.Leases"
CONTENT = "containerd.services.content.v1.Content"
IMAGES = "containerd.services.images.v1.Images"
CONTAINERS = "containerd.services.containers.v1.Containers"
DIFF = "containerd.services.diff.v1.Diff"
NAMESPACES = "containerd.services.namespaces.v1.Namespaces"
INTROSPECTION = "containerd.services.introspection.v1.Introspection"
VERSION = "containerd.services.version.v1.Version"

METHODS: dict[str, dict[str, Method]] = {
    SNAPSHOTS: {
        "Prepare": Method("PrepareSnapshotRequest", "PrepareSnapshotResponse"),
        "View": Method("ViewSnapshotRequest", "ViewSnapshotResponse"),
        "Mounts": Method("MountsRequest", "MountsResponse"),
        "Commit": Method("CommitSnapshotRequest", "Empty"),
        "Remove": Method("RemoveSnapshotRequest", "Empty"),
        "Stat": Method("StatSnapshotRequest", "StatSnapshotResponse"),
        "Update": Method("UpdateSnapshotRequest", "UpdateSnapshotResponse"),
        "List": Method("ListSnapshotsRequest", "ListSnapshotsResponse", streams_responses=True),
        "Usage": Method("UsageRequest", "UsageResponse"),
        "Cleanup": Method("CleanupRequest", "Empty"),
    },
    LEASES: {
        "Create": Method("CreateLeaseRequest", "CreateLeaseResponse"),
        "Delete": Method("DeleteLeaseRequest", "Empty"),
        "List": Method("ListLeasesRequest", "ListLeasesResponse"),
    },
    CONTENT: {
        "Info": Method("ContentInfoRequest", "ContentInfoResponse"),
        "Update": Method("UpdateContentRequest", "UpdateContentResponse"),
        "List": Method("ListContentRequest", "ListContentResponse", streams_responses=True),
        "Delete": Method("DeleteContentRequest", "Empty"),
        "Read": Method("ReadContentRequest", "ReadContentResponse", streams_responses=True),
        "Write": Method(
            "WriteContentRequest",
            "WriteContentResponse",
            streams_requests=True,
            streams_responses=True,
        ),
        "Abort": Method("AbortRequest", "Empty"),
    },
    IMAGES: {
        "Get": Method("GetImageRequest", "GetImageResponse"),
        "List": Method("ListImagesRequest", "ListImagesResponse"),
        "Create": Method("CreateImageRequest", "CreateImageResponse"),
        "Update": Method("UpdateImageRequest", "UpdateImageResponse"),
        "Delete": Method("DeleteImageRequest", "Empty"),
    },
    CONTAINERS: {"List": Method("ListContainersRequest", "ListContainersResponse")},
    DIFF: {"Apply": Method("ApplyRequest", "ApplyResponse")},
    NAMESPACES: {"List": Method("ListNamespacesRequest", "ListNamespacesResponse")},
    INTROSPECTION: {"Plugins": Method("PluginsRequest", "PluginsResponse")},
    VERSION: {"Version": Method("Empty", "VersionResponse")},
}
"""Each service's methods, by its full name."""


class Message(Protocol):
    """What is used of a protobuf message beside its fields, which are attributes."""

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's name
        """The message as it travels."""

    def __getattr__(self, name: str) -> Any:
        """A field."""


class MessageType(Protocol):
    """The class of one message."""

    def __call__(self, **fields: object) -> Message:
        """A message with these fields."""

    def FromString(self, raw: bytes) -> Message:  # noqa: N802 - protobuf's name
        """A message from its wire form; protobuf's DecodeError if it is not one."""


def build(table: Mapping[str, str]) -> dict[str, MessageType]:
    """The class of each message of a table that is written as this module's is."""
    file = descriptor_pb2.FileDescriptorProto(
        name="snapshotter/containerd.proto", package=_PACKAGE, syntax="proto3"
    )
    for name, row in table.items():
        message = file.message_type.add(name=name)
        for field in filter(None, row.split(", ")):
            _add_field(message, *field.split(" "))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    kinds = {name: pool.FindMessageTypeByName(f"{_PACKAGE}.{name}") for name in table}
    return {
        name: cast("MessageType", message_factory.GetMessageClass(kind))
        for name, kind in kinds.items()
    }


def _add_field(
    message: descriptor_pb2.DescriptorProto, number: str, name: str, written: str
) -> None:
    kinds = descriptor_pb2.FieldDescriptorProto
    scalars = {
        "s": kinds.TYPE_STRING,
        "y": kinds.TYPE_BYTES,
        "b": kinds.TYPE_BOOL,
        "i": kinds.TYPE_INT32,
        "l": kinds.TYPE_INT64,
        "u": kinds.TYPE_UINT64,
    }
    kind = written.removesuffix("*")
    field = message.field.add(name=name, number=int(number), label=kinds.LABEL_OPTIONAL)
    if kind in scalars:
        field.type = scalars[kind]
    else:
        field.type = kinds.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{kind}"
    if kind == "m":
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        _add_field(entry, "1", "key", "s")
        _add_field(entry, "2", "value", "s")
        field.type_name = f".{_PACKAGE}.{message.name}.{entry.name}"
    if kind == "m" or written.endswith("*"):
        field.label = kinds.LABEL_REPEATED


MESSAGES: dict[str, MessageType] = build(_MESSAGES)
"""The class of each message of the table, by name."""


def new(name: str, /, **fields: object) -> Message:
    """A message of the table: ``new("MountsRequest", key="k")``."""
    return MESSAGES[name](**fields)
