"""Messages of the daemon's control socket: frames of JSON, with descriptors beside some answers.

A request is one frame. The daemon answers with any number of ``progress`` and then exactly one
other response; one that is longer than a frame may be comes as the body of ``long``. ``mounted``
comes with one descriptor (SCM_RIGHTS): a detached mount, which the asker places in its own mount
namespace with move_mount(2).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from snapshotter.store.images import ImageRecord

ViewName = Literal["auto", "kernel", "fuse", "virtiofs"]


class _Request(msgspec.Struct, tag_field="op", forbid_unknown_fields=True, kw_only=True):
    pass


class Status(_Request, tag="status"):
    """What the daemon and its processes are doing."""


class Pull(_Request, tag="pull"):
    """Make an image known here: its record and its metadata image, no content.

    ``authfile`` is the absolute path of credentials; None leaves it to the cache server to look.
    """

    image: str
    architecture: str | None = None
    refresh: bool = True
    authfile: str | None = None


class Mount(_Request, tag="mount"):
    """Make a view of an image, pulling it first when it is not known.

    ``upper`` is an absolute directory that holds (or will hold) ``upper/``, ``work/`` and
    ``upper.json``; None means a private one, removed with the mount. ``owner_pid`` is the process
    whose end ends the mount (a sandbox's), or None when only unmounting does.
    """

    image: str
    architecture: str | None = None
    view: ViewName = "auto"
    upper: str | None = None
    read_only: bool = False
    volatile: bool = False
    owner_pid: int | None = None
    authfile: str | None = None


class Placed(_Request, tag="placed"):
    """The mount now stands at ``target`` in the mount namespace of process ``pid``."""

    id: str
    target: str
    pid: int


class Unmounted(_Request, tag="unmounted"):
    """The mount is gone from where it stood: drop its record and its private upper."""

    id: str


class CheckChain(_Request, tag="check_chain"):
    """Make sure that the layers up to a chain id can be mounted, without merging them yet.

    The cache server prepares ``image`` when it does not know the chain. ``authfile`` as for pull.
    """

    chain: str
    image: str | None = None
    authfile: str | None = None


class Lend(_Request, tag="lend"):
    """Make a chain's merged image ready for a view that somebody else mounts: containerd.

    ``mount_id`` is 12 hex digits of the asker's choice; ``snapshotter:<mount_id>`` is to be the
    source of the mount, by which it is found. ``unmounted`` gives it back.
    """

    chain: str
    mount_id: str
    read_only: bool


class ListMounts(_Request, tag="list_mounts"):
    """The mounts that stand."""


class ListImages(_Request, tag="list_images"):
    """The images that were pulled."""


class Inspect(_Request, tag="inspect"):
    """One pulled image, by reference, handle, digest or number."""

    image: str


class Documents(_Request, tag="documents"):
    """The manifest of a pulled image (as of inspect), its config, and the indexes above it."""

    image: str


class RemoveImage(_Request, tag="remove_image"):
    """Forget a pulled image, or one name of an image that has several; its content stays.

    ``busy`` while it is mounted. ``dry_run`` only says what would be removed.
    """

    image: str
    dry_run: bool = False


class Evict(_Request, tag="evict"):
    """Remove contents (object names, 4096 at most) from the store; see ``store_control``."""

    names: list[str]


class Discard(_Request, tag="discard"):
    """Check contents (object names) and remove those that are corrupt; see ``store_control``."""

    names: list[str]


class Refresh(_Request, tag="refresh"):
    """Let idle files of all views resolve anew: what was evicted is free after that."""


class Facts(_Request, tag="facts"):
    """What this host can do, as the daemon found by probing."""


class Stop(_Request, tag="stop"):
    """End the daemon and, when no mount needs them, the processes it started."""


Request = (
    Status
    | Pull
    | Mount
    | Placed
    | Unmounted
    | CheckChain
    | Lend
    | ListMounts
    | ListImages
    | Inspect
    | Documents
    | RemoveImage
    | Evict
    | Discard
    | Refresh
    | Facts
    | Stop
)


class _Response(msgspec.Struct, tag_field="status", kw_only=True):
    pass


class Progress(_Response, tag="progress"):
    """How far a pull is; the fields are cache-v1's."""

    phase: str
    layer: str | None = None
    done_bytes: int = 0
    total_bytes: int | None = None


class Running(_Response, tag="running"):
    """The answer to status. ``processes`` maps each process's name to its pid (None: not up)."""

    version: str
    pid: int
    root: str
    run: str
    processes: dict[str, int | None]
    counters: dict[str, int]


class MountRecord(msgspec.Struct, kw_only=True):
    """One mount. ``device`` is st_dev of the view's root; ``target`` is None until placed.

    ``degraded`` says what is wrong with the mount and how to mend it; empty when nothing is.
    ``lent`` tells a view that somebody else mounts, when and where he likes; its ``device`` is 0.
    """

    id: str
    image: str
    image_number: int
    view: str
    upper: str | None
    private_upper: bool
    read_only: bool
    created_at_s: float
    device: int
    target: str | None = None
    pid: int | None = None
    owner_pid: int | None = None
    degraded: str = ""
    lent: bool = False


class Mounted(_Response, tag="mounted"):
    """A view was made; its detached mount comes beside this. ``reason`` says why this view."""

    mount: MountRecord
    image: ImageRecord
    reason: str


class Lent(_Response, tag="lent"):
    """The answer to lend. The metadata image is an object of this root.

    ``erofs_file``: the kernel mounts it as it is, else by a loop device. ``self_contained``: the
    kernel follows redirects of data for an upper that never holds them itself.
    """

    mount: MountRecord
    image: ImageRecord
    erofs_file: bool
    self_contained: bool


class Mounts(_Response, tag="mounts"):
    """The answer to list_mounts."""

    mounts: list[MountRecord]


class Images(_Response, tag="images"):
    """The answer to list_images."""

    images: list[ImageRecord]


class Image(_Response, tag="image"):
    """The answer to pull and inspect."""

    image: ImageRecord


class ImageDocuments(_Response, tag="documents"):
    """The answer to documents: ``documents`` are exact texts, the manifest last, below the index
    that the reference named (and any between), where there is one.
    """

    image: ImageRecord
    documents: list[str]


class Removed(_Response, tag="removed"):
    """The answer to remove_image: the image as it was, and the names that are gone with it.

    ``whole`` is false when only a name went.
    """

    image: ImageRecord
    names: list[str]
    whole: bool


class Evicted(_Response, tag="evicted"):
    """The answer to evict: contents removed, bytes of disk they had, contents kept."""

    removed: int
    freed_bytes: int
    kept: int


class Discarded(_Response, tag="discarded"):
    """The answer to discard: the contents that were corrupt and are gone."""

    names: list[str]


class Fact(msgspec.Struct, kw_only=True):
    """One thing that this host can or cannot do, and what to do about it."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""


class HostFacts(_Response, tag="facts"):
    """The answer to facts: each view with whether it works here, and the single findings."""

    views: list[Fact]
    facts: list[Fact]


class Long(_Response, tag="long"):
    """The response is the body that follows, ``length_bytes`` of JSON: it fits no frame."""

    length_bytes: int


class Done(_Response, tag="done"):
    """It is done; there is nothing to say."""


class Failed(_Response, tag="failed"):
    """It failed; ``code`` is an error code of ``snapshotter.errors``."""

    code: str
    message: str


Response = (
    Progress
    | Running
    | Mounted
    | Lent
    | Mounts
    | Images
    | Image
    | ImageDocuments
    | Removed
    | Evicted
    | Discarded
    | HostFacts
    | Long
    | Done
    | Failed
)
