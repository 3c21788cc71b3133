"""Image references, spelled as skopeo spells them.

``docker://[HOST[:PORT]/]NAME[:TAG][@sha256:…]``, or without ``docker://``, names an image in a
registry (docker.io where there is no host). ``oci:DIR[:TAG]`` names one in an OCI layout on this
host, ``oci-archive:FILE[:TAG]`` in a tar of one, ``docker-archive:FILE[:NAME[:TAG]]`` in what
``docker save`` writes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from snapshotter.errors import InvalidInputError

LocalTransport = Literal["oci", "oci-archive", "docker-archive"]
LOCAL_TRANSPORTS: tuple[LocalTransport, ...] = get_args(LocalTransport)
DEFAULT_REGISTRY = "docker.io"
DEFAULT_TAG = "latest"
ACCEPTED = (
    "write docker://HOST/NAME[:TAG][@sha256:…], NAME[:TAG] for docker.io, oci:DIRECTORY[:TAG],"
    " oci-archive:FILE[:TAG] or docker-archive:FILE[:NAME[:TAG]]"
)

_OTHER_TRANSPORTS = frozenset(
    (
        "atomic",
        "containers-storage",
        "dir",
        "docker",
        "docker-daemon",
        "http",
        "https",
        "openshift",
        "ostree",
        "sif",
        "tarball",
    )
)
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_PART}(?:/{_PART})*")
_HOST_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_HOST = re.compile(rf"(?:{_HOST_LABEL}(?:\.{_HOST_LABEL})*|\[[0-9A-Fa-f:.]+\])(?::[0-9]{{1,5}})?")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MAX_NAME_BYTES = 255
_MAX_REFERENCE_BYTES = 8192


@dataclass(frozen=True, slots=True)
class RegistryReference:
    """An image in a registry. ``digest``, where given, decides; else ``tag`` does."""

    host: str
    repository: str
    tag: str | None = None
    digest: str | None = None

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        digest = f"@{self.digest}" if self.digest else ""
        return f"docker://{self.host}/{self.repository}{tag}{digest}"

    @property
    def target(self) -> str:
        """What the registry is asked for: the digest, else the tag."""
        return self.digest or self.tag or DEFAULT_TAG


@dataclass(frozen=True, slots=True)
class LocalReference:
    """An image in a layout or archive at ``path``; without a tag, the only one there.

    ``tag`` is the name that the layout gives the image; in a docker-archive, ``NAME:TAG``.
    """

    transport: LocalTransport
    path: str
    tag: str | None = None

    def __str__(self) -> str:
        return f"{self.transport}:{self.path}" + (f":{self.tag}" if self.tag else "")


Reference = RegistryReference | LocalReference


def parse_reference(text: str) -> Reference:
    """The reference that ``text`` spells; InvalidInputError says what is accepted."""
    if len(text) > _MAX_REFERENCE_BYTES or any(char.isspace() or char == "\0" for char in text):
        raise InvalidInputError(f"image reference {text[:80]!r}: too long or has blanks")
    if text.startswith("docker://"):
        return _registry_reference(text, text.removeprefix("docker://"))
    transport, colon, rest = text.partition(":")
    for local in LOCAL_TRANSPORTS:
        if colon and transport == local:
            return _local_reference(text, local, rest)
    if colon and transport in _OTHER_TRANSPORTS:
        raise InvalidInputError(
            f"image reference {text!r}: transport {transport!r} is not read here; {ACCEPTED}"
        )
    return _registry_reference(text, text)


def check_host(text: str) -> str:
    """``text``, if it is a registry's ``HOST[:PORT]``; else InvalidInputError."""
    if _HOST.fullmatch(text) is None:
        raise InvalidInputError(f"registry {text[:80]!r}: write HOST or HOST:PORT, without more")
    return text


def _local_reference(text: str, transport: LocalTransport, rest: str) -> LocalReference:
    path, colon, tag = rest.partition(":")
    if not path.startswith("/"):
        raise InvalidInputError(f"image reference {text!r}: the path must be absolute")
    if colon and not tag:
        raise InvalidInputError(f"image reference {text!r}: the tag is empty")
    if tag and transport == "docker-archive":
        tag = _archive_name(text, tag)
    return LocalReference(transport, path.rstrip("/") or "/", tag or None)


def _archive_name(text: str, name: str) -> str:
    """``NAME:TAG`` in full, as the archive's own names are compared with it."""
    named = _registry_reference(text, name)
    if named.digest is not None:
        raise InvalidInputError(f"image reference {text!r}: archives know images by tag alone")
    return str(named).removeprefix("docker://")


def _registry_reference(text: str, rest: str) -> RegistryReference:
    name, at, digest = rest.partition("@")
    if at and _DIGEST.fullmatch(digest) is None:
        raise InvalidInputError(f"image reference {text!r}: {digest!r} is not sha256:<64 hex>")
    head, slash, last = name.rpartition("/")
    last, colon, tag = last.partition(":")
    if colon and _TAG.fullmatch(tag) is None:
        raise InvalidInputError(f"image reference {text!r}: {tag!r} is not a tag")
    host, repository = _split_host(head + slash + last)
    if (
        _REPOSITORY.fullmatch(repository) is None
        or _HOST.fullmatch(host) is None
        or len(host) + len(repository) > _MAX_NAME_BYTES
    ):
        raise InvalidInputError(f"image reference {text!r}: not an image name; {ACCEPTED}")
    if not tag and not digest:
        tag = DEFAULT_TAG
    return RegistryReference(host, repository, tag or None, digest or None)


def _split_host(name: str) -> tuple[str, str]:
    """Host and repository: the first part is a host if it cannot be the start of a name."""
    first, slash, rest = name.partition("/")
    is_host = slash and (
        "." in first or ":" in first or first == "localhost" or first.lower() != first
    )
    host, repository = (first, rest) if is_host else (DEFAULT_REGISTRY, name)
    if host in (DEFAULT_REGISTRY, "index.docker.io"):
        host = DEFAULT_REGISTRY
        repository = repository if "/" in repository else f"library/{repository}"
    return host, repository
