"""Settings, from ``config.toml`` below the root (or ``--config``); every one has a default."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Literal

import msgspec

from snapshotter.decoding import DECODE_ERRORS
from snapshotter.errors import InvalidInputError

MIB = 1 << 20
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]{1,5})?|\[[0-9A-Fa-f:]+\](:[0-9]{1,5})?")
_LIMIT = re.compile(r"[a-z_]+=[1-9][0-9]{0,18}[kMGT]?")
_LEAST = {
    "large_file_bytes": MIB,
    "companions_bytes": 0,
    "lookup_deadline_s": 0.001,
    "keeper_patience_s": 0.001,
    "settle_s": 0,
    "min_free_bytes": 0,
    "read_ahead_kb": 0,
    "fetch_ahead_bytes": 0,
}


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an operator may tune. Sizes are in bytes, times in seconds."""

    cache_server: Literal["auto", "external"] = "auto"
    """``auto``: the daemon starts a cache server of its own; ``external``: someone else does."""
    cache_socket: str | None = None
    """Path of the cache-v1 socket; by default ``cache.sock`` in the run directory."""
    token: str | None = None
    """Sent with every cache-v1 request, where the server wants one."""
    insecure_registries: tuple[str, ...] = ()
    """``HOST[:PORT]`` of registries that our own cache server asks in plain HTTP, as it does those
    on loopback; an external one has its option ``--insecure-registry``."""
    limits: tuple[str, ...] = ()
    """``NAME=NUMBER`` each: how large a layer or image may be for our own cache server, as with
    its option ``--limit`` (such as ``layer_bytes=50G``); a name that is none lists them all."""
    large_file_bytes: int = 8 * MIB
    """Larger files are served by chunk while they fill; smaller ones are fetched whole on open."""
    companions_bytes: int = 1 * MIB
    """How much the server may add to a fetch of small files that are likely to be next."""
    lookup_deadline_s: float = 30.0
    """A cold open fails with EIO after this long; the fetch goes on."""
    keeper_patience_s: float = 60.0
    """The keeper closes the gate after this long without a store, so that waiters can die."""
    settle_s: float = 5.0
    """Age at which an arrival is synced to disk and its undo entry dropped."""
    min_free_bytes: int = 512 * MIB
    """What is left free, or a twentieth of a smaller file system, and 1 MiB even with 0. Below it
    content is served without being kept, and what no view has open is evicted, oldest first."""
    read_ahead_kb: int = 4096
    """The gate's read-ahead in KiB; with less, cold sequential reads wait for each chunk."""
    fetch_ahead_bytes: int = 16 * MIB
    """How much of a large file is fetched before it is asked for, where it is read in sequence;
    it may be in vain. Below 2 MiB nothing is."""


def load_config(path: Path | None) -> Config:
    """Reads a TOML file; no path or no such file means the defaults.

    Raises InvalidInputError for bad TOML, an unknown setting or a value out of range.
    """
    if path is None or not path.exists():
        return Config()
    try:
        config = msgspec.toml.decode(path.read_bytes(), type=Config)
    except (*DECODE_ERRORS, ValueError) as error:
        raise InvalidInputError(f"settings in {path}: {error}") from error
    for registry in config.insecure_registries:
        if not _HOST.fullmatch(registry):
            raise InvalidInputError(
                f"settings in {path}: insecure_registries: {registry!r} is not HOST or HOST:PORT"
            )
    for limit in config.limits:
        if not _LIMIT.fullmatch(limit):
            raise InvalidInputError(f"settings in {path}: limits: {limit!r} is not NAME=NUMBER")
    for name, least in _LEAST.items():
        value = getattr(config, name)
        if not least <= value < math.inf:
            raise InvalidInputError(f"settings in {path}: {name} must be at least {least:g}")
    return config
