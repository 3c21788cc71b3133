"""What a sandbox is to be: its settings, how they are parsed, and how an image's config adds to it.

Pure, but for ``check_sources``. Everything that a user may get wrong is found here, before
anything is mounted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from snapshotter.cache_v1.protocol import Prepared
from snapshotter.decoding import DECODE_ERRORS
from snapshotter.errors import CorruptError, InvalidInputError, NotFoundError

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_HOSTNAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,62}[A-Za-z0-9])?")
_USER_PART = re.compile(r"[^:\s/]+")
_RESERVED = ("/", "/proc", "/sys", "/dev")


@dataclass(frozen=True, slots=True)
class Volume:
    """A file or directory of the host (``source``, absolute) seen at ``target`` in the sandbox."""

    source: str
    target: str
    read_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What was asked for on the command line; None leaves a thing to the image.

    ``command`` comes in place of the image's cmd, ``entrypoint`` in place of its entrypoint (an
    empty string: of none). ``user`` is ``NAME|UID[:GROUP|GID]``.
    """

    command: Sequence[str] = ()
    entrypoint: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    volumes: Sequence[Volume] = ()
    user: str | None = None
    workdir: str | None = None
    hostname: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a sandbox is made of beside its view, whatever runs in it.

    ``read_only`` says that nothing can be created in the view; ``has_terminal`` that stdin is one.
    """

    hostname: str
    volumes: Sequence[Volume]
    read_only: bool
    has_terminal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings and image together: the command, as whom and where it runs."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    user: str
    workdir: str


class _RunConfig(msgspec.Struct, rename={"user": "User", "workdir": "WorkingDir"}):
    """The part of an OCI image config's ``config`` that cache-v1 has no fields for."""

    user: str | None = None
    workdir: str | None = None


class _ImageConfig(msgspec.Struct):
    config: _RunConfig | None = None


def parse_volume(text: str, directory: str) -> Volume:
    """``SRC:DST[:ro|rw]``; a relative SRC is below ``directory``.

    Raises InvalidInputError for another form, a relative DST or one that the sandbox needs itself.
    """
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    if not source or not target or mode not in ("", "ro", "rw"):
        raise InvalidInputError(f"volume {text!r}: write SRC:DST or SRC:DST:ro")
    normal = os.path.normpath(target)
    if not target.startswith("/") or normal.lstrip("/") == "" or normal in _RESERVED:
        raise InvalidInputError(
            f"volume {text!r}: the destination must be an absolute path "
            f"other than {', '.join(_RESERVED)}"
        )
    absolute = os.path.normpath(os.path.join(directory, source))
    return Volume(absolute, "/" + normal.lstrip("/"), mode == "ro")


def parse_environment(texts: Sequence[str], host: Mapping[str, str]) -> dict[str, str]:
    """``K=V`` sets a variable; ``K`` alone passes on the host's, if there is one.

    Raises InvalidInputError for an empty name.
    """
    parsed: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name:
            raise InvalidInputError(f"environment {text!r}: write NAME=VALUE or NAME")
        if equals:
            parsed[name] = value
        elif name in host:
            parsed[name] = host[name]
    return parsed


def check_settings(settings: Settings) -> None:
    """Raises InvalidInputError for a user, directory or hostname that can never work."""
    if settings.user is not None:
        split_user(settings.user)
    if settings.workdir is not None and not settings.workdir.startswith("/"):
        raise InvalidInputError(f"working directory {settings.workdir!r}: it must be absolute")
    if settings.hostname is not None and _HOSTNAME.fullmatch(settings.hostname) is None:
        raise InvalidInputError(
            f"hostname {settings.hostname!r}: letters, digits, dots and dashes, 64 at most"
        )


def check_sources(volumes: Sequence[Volume]) -> None:
    """Raises NotFoundError for a volume whose source does not exist."""
    for volume in volumes:
        if not os.path.exists(volume.source):
            raise NotFoundError(f"volume source {volume.source} does not exist; create it first")


def split_user(text: str) -> tuple[str, str | None]:
    """User and group of ``USER[:GROUP]``; InvalidInputError for another form."""
    user, colon, group = text.partition(":")
    parts = (user, group) if colon else (user,)
    if not all(_USER_PART.fullmatch(part) for part in parts):
        raise InvalidInputError(f"user {text!r}: write NAME, UID, or either with :GROUP")
    return user, group if colon else None


def make_surroundings(
    settings: Settings, *, host_name: str, read_only: bool, has_terminal: bool = False
) -> Surroundings:
    """The sandbox of these settings; ``host_name`` is its name where they give none."""
    return Surroundings(
        hostname=settings.hostname or host_name,
        volumes=sorted(settings.volumes, key=lambda volume: volume.target.count("/")),
        read_only=read_only,
        has_terminal=has_terminal,
    )


def make_plan(
    settings: Settings, prepared: Prepared, *, host_name: str, terminal: str | None
) -> Plan:
    """Settings over the image's config. ``terminal`` is TERM where there is a terminal, else None.

    Raises InvalidInputError when there is nothing to run, CorruptError for a bad image config.
    """
    config = _run_config(prepared)
    hostname = settings.hostname or host_name
    environment = {"PATH": DEFAULT_PATH, "HOSTNAME": hostname}
    if terminal is not None:
        environment["TERM"] = terminal
    environment |= prepared.env
    environment |= settings.environment
    return Plan(
        arguments=_arguments(settings, prepared),
        environment=environment,
        user=settings.user or config.user or "0",
        workdir=os.path.join("/", settings.workdir or config.workdir or "/"),
    )


def _arguments(settings: Settings, prepared: Prepared) -> list[str]:
    if settings.entrypoint is None:
        entrypoint = prepared.entrypoint or []
        command = list(settings.command) or prepared.cmd or []
    else:
        # The image's cmd are arguments of the image's entrypoint: it goes when that goes.
        entrypoint = [settings.entrypoint] if settings.entrypoint else []
        command = list(settings.command)
    arguments = [*entrypoint, *command]
    if not arguments:
        raise InvalidInputError(
            "run: the image names no command, and none was given; add one: run IMAGE -- CMD"
        )
    return arguments


def _run_config(prepared: Prepared) -> _RunConfig:
    if prepared.config is None:
        return _RunConfig()
    try:
        return msgspec.json.decode(prepared.config, type=_ImageConfig).config or _RunConfig()
    except DECODE_ERRORS as error:
        raise CorruptError(f"config of image {prepared.image_handle}: {error}") from error


def find_program(name: str, path: str) -> Sequence[str]:
    """Where ``name`` may be, in order: itself if it has a slash, else below each part of PATH."""
    if "/" in name:
        return [name]
    return [os.path.join(part or ".", name) for part in path.split(":")]
