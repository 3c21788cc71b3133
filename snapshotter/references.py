"""Image references as they are typed, before anybody parses them."""

from __future__ import annotations

import os

from snapshotter.errors import InvalidInputError

_LOCAL_TRANSPORTS = ("oci", "oci-archive", "docker-archive")
_DEFAULT_HOST = "docker.io"
_HOSTS_OF_DOCKER = (_DEFAULT_HOST, "index.docker.io")


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


def registry_name(image: str) -> str:
    """The full name of an image in a registry, as docker and containerd write it.

    ``debian`` is ``docker.io/library/debian:latest``. Raises InvalidInputError for an image that
    is in no registry; what else is wrong with a name is for the cache server to say.
    """
    transport, colon, _ = image.partition(":")
    if colon and transport in _LOCAL_TRANSPORTS:
        raise InvalidInputError(f"image {image!r}: only images of registries have a name; push it")
    name, at, digest = image.removeprefix("docker://").partition("@")
    first, slash, rest = name.partition("/")
    is_host = "." in first or ":" in first or first == "localhost" or first != first.lower()
    host, path = (first, rest) if slash and is_host else (_DEFAULT_HOST, name)
    if host in _HOSTS_OF_DOCKER:
        host = _DEFAULT_HOST
        path = path if "/" in path else f"library/{path}"
    if not at and ":" not in path.rpartition("/")[2]:
        path += ":latest"
    return f"{host}/{path}{at}{digest}"
