"""Credentials from an authfile, as podman, skopeo and docker write it (containers-auth.json)."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

import msgspec

from cache_server.sources.reference import DEFAULT_REGISTRY, RegistryReference
from snapshotter.errors import InvalidInputError, NotFoundError

Credentials = tuple[str, str]
"""User name and password for one registry."""

_DOCKER_HUB_KEYS = ("index.docker.io", "https://index.docker.io/v1/")


class _Entry(msgspec.Struct):
    auth: str = ""


class _AuthFile(msgspec.Struct):
    auths: dict[str, _Entry] = {}


def find_credentials(authfile: str, reference: RegistryReference) -> Credentials | None:
    """What the file has for the image: for its repository, a part of that, or its registry.

    Raises NotFoundError if the file cannot be read, InvalidInputError if it is malformed. Neither
    message ever shows what is in it.
    """
    try:
        entries = msgspec.json.decode(Path(authfile).read_bytes(), type=_AuthFile).auths
    except OSError as error:
        raise NotFoundError(f"authfile {authfile}: {error.strerror}") from error
    except msgspec.MsgspecError:
        raise InvalidInputError(f"authfile {authfile}: not an authfile's JSON") from None
    for key in _keys(reference):
        if key in entries and entries[key].auth:
            return _decoded(entries[key].auth, authfile, key)
    return None


def _keys(reference: RegistryReference) -> list[str]:
    """Where to look, the most specific first."""
    parts = [reference.host, *reference.repository.split("/")]
    keys = ["/".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return keys + list(_DOCKER_HUB_KEYS if reference.host == DEFAULT_REGISTRY else ())


def _decoded(auth: str, authfile: str, key: str) -> Credentials:
    try:
        user, colon, password = base64.b64decode(auth, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        user, colon, password = "", "", ""
    if not colon:
        raise InvalidInputError(f"authfile {authfile}: the entry for {key} is malformed")
    return user, password
