"""Messages of the store's control socket: frames of JSON, any number of exchanges in order.

The daemon asks for content it needs itself (metadata images) and listens for events; the
processes of userspace views will ask for ranges.
"""

from __future__ import annotations

import msgspec


class _Request(msgspec.Struct, tag_field="op", forbid_unknown_fields=True, kw_only=True):
    pass


class Status(_Request, tag="status"):
    """Is the store up, and what has it done?"""


class Ensure(_Request, tag="ensure"):
    """Have content here: all of it as an object, or with ``length`` only a range of a large file.

    ``name`` is an object name; ``image`` the number of the image record it belongs to (0: none).
    Answered by ``done`` when it is here, verified.
    """

    name: str
    image: int = 0
    offset: int = 0
    length: int | None = None


class Settle(_Request, tag="settle"):
    """Make every arrival durable now and drop its undo entry; answered by ``done``."""


class Evict(_Request, tag="evict"):
    """Remove contents (object names, 4096 at most) that are worth less than their space.

    Answered by ``evicted``. Kept are metadata images of recorded images and what just arrived.
    """

    names: list[str]


class Discard(_Request, tag="discard"):
    """Check contents (object names), remove those that are corrupt; answered by ``discarded``."""

    names: list[str]


class Subscribe(_Request, tag="subscribe"):
    """From now on this connection carries events; it takes no further request."""


class Stop(_Request, tag="stop"):
    """End the store in good order; the gate then waits for a successor."""


Request = Status | Ensure | Settle | Evict | Discard | Subscribe | Stop


class _Response(msgspec.Struct, tag_field="status", kw_only=True):
    pass


class Running(_Response, tag="running"):
    """The answer to status; ``counters`` are totals since the process began."""

    pid: int
    counters: dict[str, int]


class Done(_Response, tag="done"):
    """It is done."""


class Evicted(_Response, tag="evicted"):
    """The answer to evict: contents removed, bytes of disk they had, contents kept."""

    removed: int
    freed_bytes: int
    kept: int


class Discarded(_Response, tag="discarded"):
    """The answer to discard: the contents that were corrupt and are gone."""

    names: list[str]


class Failed(_Response, tag="failed"):
    """It failed; ``code`` is an error code of ``snapshotter.errors``."""

    code: str
    message: str


class Resolvable(_Response, tag="resolvable"):
    """An event: content that views may hold as a file of the gate is now a complete object.

    Remounting a view lets its idle files resolve to the object (kernel speed from then on). The
    same follows an eviction for want of space: until a remount views hold on to what was evicted.
    """

    names: list[str]


Response = Running | Done | Evicted | Discarded | Failed | Resolvable
