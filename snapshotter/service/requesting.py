"""What users write of images and mounts, as the requests that the daemon takes.

For the command line and the Python surface. Pure, but for the working directory.
"""

from __future__ import annotations

import os
from typing import get_args

from snapshotter.authfiles import chosen_authfile
from snapshotter.errors import InvalidInputError
from snapshotter.platforms import parse_platform
from snapshotter.references import absolute_image
from snapshotter.service import control

FOR_GUESTS = "it is for virtual machines: snapshotter virtiofs IMAGE --socket PATH"


def image_here(image: str) -> str:
    """``image`` as the daemon needs it: paths absolute from the current directory."""
    return absolute_image(image, os.getcwd())


def architecture_of(platform: str | None) -> str | None:
    """The architecture that a platform names; errors are ``parse_platform``'s."""
    return None if platform is None else parse_platform(platform)


def mount_request(
    image: str,
    *,
    platform: str | None,
    authfile: str | None,
    view: str,
    upper: str | None,
    read_only: bool,
    volatile: bool = False,
    owner_pid: int | None = None,
) -> control.Mount:
    """A mount request of a user's words; InvalidInputError if they make no sense together."""
    views: tuple[control.ViewName, ...] = get_args(control.ViewName)
    chosen = next((name for name in views if name == view), None)
    if chosen is None:
        raise InvalidInputError(f"view {view!r}: choose one of {', '.join(views)}")
    if chosen == "virtiofs":
        raise InvalidInputError(f"view virtiofs: {FOR_GUESTS}")
    if upper is not None and read_only:
        raise InvalidInputError(
            "an upper and read-only: a read-only mount writes nothing; choose one"
        )
    return control.Mount(
        image=image_here(image),
        architecture=architecture_of(platform),
        authfile=chosen_authfile(authfile),
        view=chosen,
        upper=None if upper is None else os.path.realpath(upper),
        read_only=read_only,
        volatile=volatile,
        owner_pid=owner_pid,
    )
