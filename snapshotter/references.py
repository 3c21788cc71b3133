"""Image references as they are typed, before anybody parses them."""

from __future__ import annotations

import os

_LOCAL_TRANSPORTS = ("oci", "oci-archive", "docker-archive")


def absolute_image(image: str, directory: str) -> str:
    """``image`` with its path, where it has one, made absolute from ``directory``.

    Local images are spelled as skopeo does: ``oci:PATH[:TAG]``, ``oci-archive:PATH[:TAG]``,
    ``docker-archive:PATH[:NAME[:TAG]]``. Anything else is left as it is.
    """
    transport, colon, rest = image.partition(":")
    if not colon or transport not in _LOCAL_TRANSPORTS or not rest:
        return image
    path, tag_colon, tag = rest.partition(":")
    absolute = os.path.normpath(os.path.join(directory, os.path.expanduser(path)))
    return f"{transport}:{absolute}{tag_colon}{tag}"
