"""HTTP to registries: who is spoken to in plain text, whose certificates count, which proxies.

Users: registry sources, which share one ``Network`` in a process. Every request passes through its
transport, redirects and token services included, so that no rule can be gone around.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import httpx

from cache_server.sources.proxies import is_loopback, proxy_for
from cache_server.sources.reference import check_host
from snapshotter.errors import AccessDeniedError, InvalidInputError

_CONNECT_TIMEOUT_S = 15.0
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSettings:
    """How registries are reached."""

    insecure_registries: frozenset[str] = frozenset()
    """``HOST[:PORT]`` of registries to be asked in plain HTTP; those on loopback are anyway."""
    certificate_directories: tuple[str, ...] = ("/etc/containers/certs.d", "/etc/docker/certs.d")
    """Where a directory ``HOST[:PORT]`` may have CAs (``*.crt``), beside which the system's count
    too, and this client's own certificate (``NAME.cert`` with ``NAME.key``)."""
    stall_timeout_s: float = 30.0
    """A connection on which nothing comes for so long is given up, and tried again."""


def settings_with(insecure_registries: Iterable[str]) -> NetworkSettings:
    """The defaults with these insecure registries; InvalidInputError for what is no HOST[:PORT]."""
    return NetworkSettings(insecure_registries=frozenset(map(check_host, insecure_registries)))


class Network:
    """The HTTP client for all registries; ``aclose`` it."""

    def __init__(
        self,
        settings: NetworkSettings = NetworkSettings(),
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._settings = settings
        timeout = httpx.Timeout(settings.stall_timeout_s, connect=_CONNECT_TIMEOUT_S, pool=None)
        self.client = httpx.AsyncClient(
            transport=_Transport(settings, environ),
            follow_redirects=True,
            max_redirects=5,
            timeout=timeout,
            trust_env=False,  # the transport does what the environment says
            headers={"User-Agent": "lazy-snapshotter", "Accept-Encoding": "identity"},
        )

    def scheme_of(self, host: str) -> str:
        """``http`` for a registry that may be asked so and has no certificates here."""
        url = httpx.URL(f"//{host}")
        names = _names(url.host, url.port)
        is_plain = is_loopback(url.host) or not self._settings.insecure_registries.isdisjoint(names)
        return "http" if is_plain and not _certificate_files(self._settings, names) else "https"

    async def aclose(self) -> None:
        """Closes connections that are still open."""
        await self.client.aclose()


class _Transport(httpx.AsyncBaseTransport):
    """Sends each request through a pool of connections with the right proxy and certificates.

    Certificates are looked at for each request, so that changed ones count at once.
    """

    def __init__(self, settings: NetworkSettings, environ: Mapping[str, str]) -> None:
        self._settings = settings
        self._environ = environ
        self._pools: dict[tuple[object, ...], httpx.AsyncHTTPTransport] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Sends a request; AccessDeniedError for plain HTTP to where that must not go."""
        url = request.url
        port = url.port or _PORTS.get(url.scheme, 0)
        names = _names(url.host, port)
        insecure = self._settings.insecure_registries
        if url.scheme != "https" and not is_loopback(url.host) and insecure.isdisjoint(names):
            raise AccessDeniedError(
                f"{request.method} {url}: plain HTTP is for registries on loopback and those that"
                " cache-server's --insecure-registry names"
            )
        files = _certificate_files(self._settings, names) if url.scheme == "https" else ()
        proxy = proxy_for(url.scheme, url.host, port, self._environ)
        key = (url.scheme, proxy, *files)
        if key not in self._pools:
            self._pools[key] = httpx.AsyncHTTPTransport(
                verify=_context([path for path, _ in files], has_tls=url.scheme == "https"),
                proxy=proxy,
                limits=httpx.Limits(max_connections=32, max_keepalive_connections=8),
                trust_env=False,
            )
        try:
            return await self._pools[key].handle_async_request(request)
        except ssl.SSLError as error:  # what comes after the handshake, httpx lets pass
            raise httpx.ConnectError(str(error), request=request) from error

    async def aclose(self) -> None:
        """Closes every pool."""
        for pool in self._pools.values():
            await pool.aclose()


def _names(host: str, port: int | None) -> list[str]:
    """What a host may be called by settings: the port may be left out where it is the usual one."""
    shown = f"[{host}]" if ":" in host else host
    with_port = [] if port is None else [f"{shown}:{port}"]
    return [*with_port, shown] if port in (None, *_PORTS.values()) else with_port


def _certificate_files(settings: NetworkSettings, names: list[str]) -> tuple[tuple[str, int], ...]:
    """The files with certificates for a host, each with its time of modification in ns."""
    found = []
    for directory in settings.certificate_directories:
        for name in names:
            if name.startswith("."):
                continue  # a redirect may go to any host, but no host leads out of here
            with (
                contextlib.suppress(FileNotFoundError, NotADirectoryError),
                os.scandir(os.path.join(directory, name)) as entries,
            ):
                found += [
                    (entry.path, entry.stat().st_mtime_ns)
                    for entry in entries
                    if entry.name.endswith((".crt", ".cert", ".key"))
                ]
    return tuple(sorted(found))


def _context(paths: list[str], *, has_tls: bool) -> ssl.SSLContext:
    """The system's CAs, or those of SSL_CERT_FILE and SSL_CERT_DIR, and what ``paths`` add."""
    if not has_tls:
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # trusts nobody; CAs take 40 ms to read
    context = ssl.create_default_context()
    for path in paths:
        try:
            if path.endswith(".crt"):
                context.load_verify_locations(path)
            elif path.endswith(".cert"):
                context.load_cert_chain(path, path.removesuffix(".cert") + ".key")
        except OSError as error:  # ssl.SSLError is one
            raise InvalidInputError(f"certificate {path}: cannot use it: {error}") from error
    return context
