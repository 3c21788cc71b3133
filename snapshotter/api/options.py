"""What may be chosen, in one place for both halves: every key may be left out."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol, TypedDict

from snapshotter.service.control import Progress, ViewName
from snapshotter.service.sandbox_spec import Volume
from snapshotter.store.images import ImageRecord

Name = str | os.PathLike[str]
ImageName = str | ImageRecord
"""An image as the command line spells it, or what ``pull``, ``images`` and ``inspect`` return."""

ProgressCallback = Callable[[Progress], None]


class HasDescriptor(Protocol):
    """An open file, or anything else that a descriptor stands behind."""

    def fileno(self) -> int:
        """The descriptor."""


Stream = Literal["pipe", "null", "inherit"] | int | HasDescriptor
"""Where a command's stream leads: a pipe to here, nowhere, this program's own, or an open file."""


class PullOptions(TypedDict, total=False):
    """How an image is pulled."""

    platform: str | None
    """Of a multi-platform image: ``arm64``, ``linux/arm/v7``. Default: this host's."""
    authfile: Name | None
    """Credentials as podman and docker keep them; default: where those log in."""
    on_progress: ProgressCallback | None
    """Told how far the pull is; in the asynchronous half in the event loop's thread."""


class ViewOptions(PullOptions, total=False):
    """How a view of an image is made."""

    view: ViewName
    """``auto`` (the default) takes the fastest view that this host allows."""
    upper: Name | None
    """Keeps what is written in this directory, for later views of the same image. Default: a
    private upper, removed at the end."""
    read_only: bool
    """Refuses every write."""
    volatile: bool
    """Never syncs what is written to a kept upper: faster, lost in a power cut."""


class MountOptions(ViewOptions, total=False):
    """How an image is mounted."""

    nosuid: bool
    """Takes set-uid bits and file capabilities out of force."""
    nodev: bool
    """Takes device nodes out of force."""


class SandboxOptions(ViewOptions, total=False):
    """How a sandbox is made; environment, user and directory are its commands' defaults."""

    env: Mapping[str, str]
    """Variables, over those of the image."""
    user: str | None
    """``NAME|UID[:GROUP|GID]``, names being the image's. Default: the image's user."""
    cwd: str | None
    """Where commands start; made if missing. Default: the image's working directory."""
    volumes: Sequence[Volume | str]
    """Files and directories of the host to show: a Volume, or ``SRC:DST[:ro]``."""
    hostname: str | None
    """Default: the mount's id."""


class CommandOptions(TypedDict, total=False):
    """How a command is started, over the sandbox's own options."""

    env: Mapping[str, str]
    """More variables."""
    user: str | None
    """``NAME|UID[:GROUP|GID]``."""
    cwd: str | None
    """Where to start; made if missing."""
    stdin: Stream
    """Default: null."""
    stdout: Stream
    """Default: a pipe."""
    stderr: Stream | Literal["stdout"]
    """Default: a pipe of its own."""


class RunOptions(CommandOptions, total=False):
    """How a command is run to its end."""

    input: bytes | str | None
    """What it reads from stdin; text as UTF-8."""
    timeout: float | None
    """Seconds after which it is killed with all it started. Default: none."""
    check: bool
    """Raises CommandFailedError for an exit status other than 0."""


def text_of(name: Name | None) -> str | None:
    """A path as text; None stays None."""
    return None if name is None else os.fspath(name)
