"""Credentials for a registry, from the files that podman, skopeo and docker keep.

Their format is containers-auth.json(5)'s, which docker's config.json shares. An entry may be of a
whole registry or of a part of its repositories; the most specific one wins. Files may name
programs that have the credentials instead (docker's credential helpers). Nothing here shows a
secret in a message, a repr or a log.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from cache_server.sources.credential_helper import ask_helper
from cache_server.sources.reference import DEFAULT_REGISTRY, RegistryReference
from snapshotter.authfiles import usual_authfiles
from snapshotter.decoding import DECODE_ERRORS
from snapshotter.errors import InvalidInputError, NotFoundError

_DOCKER_HUB_SERVER = "https://index.docker.io/v1/"
"""What docker calls Docker Hub, in files and to helpers."""
_DOCKER_HUB_KEYS = (_DOCKER_HUB_SERVER, "index.docker.io", "registry-1.docker.io")
_TOKEN_USER = "<token>"  # noqa: S105 - how helpers and files mark an identity token
_MAX_FILE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Credentials:
    """Of one account at a registry: a password, or a token that stands for one.

    ``is_identity_token``: the secret is to be given to the token service for an access token.
    ``is_bearer``: the secret is an access token already. ``origin`` says where it was found.
    """

    user: str
    secret: str = field(repr=False)
    origin: str
    is_identity_token: bool = False
    is_bearer: bool = False


class _Entry(msgspec.Struct):
    auth: str = ""
    username: str = ""
    password: str = ""
    identitytoken: str = ""
    registrytoken: str = ""


class _AuthFile(msgspec.Struct, rename="camel"):
    auths: dict[str, _Entry] | None = None
    cred_helpers: dict[str, str] | None = None
    creds_store: str = ""


class Keyring:
    """Looks for credentials: in ``authfile`` alone, or in the user's usual files.

    ``usual`` replaces those. Making one raises NotFoundError or InvalidInputError for an authfile
    that is not there or malformed.
    """

    def __init__(self, authfile: str | None = None, *, usual: Sequence[str] | None = None) -> None:
        if authfile is not None:
            self.paths = [authfile]
            if _read(authfile) is None:
                raise NotFoundError(f"authfile {authfile}: there is no such file")
        else:
            self.paths = list(usual_authfiles() if usual is None else usual)

    async def find(self, reference: RegistryReference) -> Credentials | None:
        """The credentials for the image, None if there are none.

        May wait for a credential helper. Raises InvalidInputError for a malformed file,
        AccessDeniedError or UnavailableError where a helper fails.
        """
        for path in self.paths:
            file = await asyncio.to_thread(_read, path)
            found = await _find_in(file, path, reference) if file is not None else None
            if found is not None:
                return found
        return None


async def _find_in(file: _AuthFile, path: str, reference: RegistryReference) -> Credentials | None:
    helpers = file.cred_helpers or {}
    for key in _registry_keys(reference):
        if key in helpers:
            return await _ask(helpers[key], path, reference)
    auths = file.auths or {}
    for key in _keys(reference, auths):
        if key in auths and (found := _credentials(auths[key], path, key)) is not None:
            return found
    return await _ask(file.creds_store, path, reference) if file.creds_store else None


async def _ask(helper: str, path: str, reference: RegistryReference) -> Credentials | None:
    is_hub = reference.host == DEFAULT_REGISTRY
    server = _DOCKER_HUB_SERVER if is_hub else reference.host
    answer = await ask_helper(helper, server, named_in=path)
    if answer is None:
        return None
    user, secret = answer
    origin = f"docker-credential-{helper}, named in {path}"
    return Credentials(user, secret, origin, is_identity_token=user == _TOKEN_USER)


def _registry_keys(reference: RegistryReference) -> Sequence[str]:
    is_hub = reference.host == DEFAULT_REGISTRY
    return (reference.host, *(_DOCKER_HUB_KEYS if is_hub else ()))


def _keys(reference: RegistryReference, auths: dict[str, _Entry]) -> list[str]:
    """Where to look, the most specific first; addresses (``https://HOST/v1/``) last."""
    parts = reference.repository.split("/")
    narrow = [f"{reference.host}/{'/'.join(parts[:n])}" for n in range(len(parts), 0, -1)]
    registry = _registry_keys(reference)
    addresses = [key for key in auths if "://" in key and _host(key) in registry]
    return [*narrow, *registry, *addresses]


def _host(address: str) -> str:
    return address.partition("://")[2].partition("/")[0]


def _credentials(entry: _Entry, path: str, key: str) -> Credentials | None:
    """What an entry has; None for one that is empty, as docker leaves them beside a helper."""
    origin = f"{path} ({key})"
    user, secret = _decoded(entry.auth, path, key) if entry.auth else ("", "")
    user, secret = user or entry.username, secret or entry.password
    if entry.registrytoken:
        return Credentials(user, entry.registrytoken, origin, is_bearer=True)
    if entry.identitytoken:
        return Credentials(user, entry.identitytoken, origin, is_identity_token=True)
    return Credentials(user, secret, origin) if user or secret else None


def _decoded(auth: str, path: str, key: str) -> tuple[str, str]:
    try:
        user, colon, password = base64.b64decode(auth, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        user, colon, password = "", "", ""
    if not colon:
        raise InvalidInputError(f"authfile {path}: the entry for {key} is malformed: log in again")
    return user, password.rstrip("\0")


def _read(path: str) -> _AuthFile | None:
    """A file's content, None if it is not there."""
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_FILE_BYTES)
        return msgspec.json.decode(data, type=_AuthFile)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise InvalidInputError(f"authfile {path}: cannot read it: {error.strerror}") from error
    except DECODE_ERRORS:
        # without the cause, which quotes what it read
        raise InvalidInputError(f"authfile {path}: not an authfile's JSON") from None
