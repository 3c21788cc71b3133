"""Registries that speak the OCI distribution API (Docker's HTTP API v2).

Registries on loopback are asked over plain HTTP, all others over HTTPS alone: a request to
elsewhere, by whatever redirect, that is not HTTPS is refused before it is sent. Transport
failures, 429 and 5xx are tried again a few times; a blob that breaks off goes on where it stopped.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

import httpx
import msgspec

from cache_server.library import BlobDescriptor
from cache_server.sources.credentials import Credentials
from cache_server.sources.manifest import (
    INDEX_TYPES,
    MANIFEST_TYPES,
    MAX_CONFIG_BYTES,
    MAX_MANIFEST_BYTES,
    Descriptor,
    check_blob,
)
from cache_server.sources.reference import DEFAULT_REGISTRY, RegistryReference
from cache_server.sources.source import ManifestSource
from snapshotter.errors import (
    AccessDeniedError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
)

T = TypeVar("T")
_DOCKER_HUB = "registry-1.docker.io"
_ATTEMPTS = 4
_MAX_RETRY_AFTER_S = 10.0
_MAX_TOKEN_BYTES = 1 << 20
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')
_ACCEPT = ", ".join((*MANIFEST_TYPES, *INDEX_TYPES))


class _TryAgain(Exception):  # noqa: N818 - never leaves this module
    """A failure that may pass; ``after_s`` is how long the registry wants to be left alone."""

    def __init__(self, why: str, after_s: float = 0.0) -> None:
        super().__init__(why)
        self.after_s = after_s


def make_client() -> httpx.AsyncClient:
    """The HTTP client that all registry sources of a process share; close it at the end."""
    return httpx.AsyncClient(
        follow_redirects=True,
        max_redirects=5,
        timeout=httpx.Timeout(30.0, pool=None),
        limits=httpx.Limits(max_connections=32, max_keepalive_connections=8),
        event_hooks={"request": [_refuse_plain_http]},
        # no proxy stands between this host and itself
        mounts=dict.fromkeys(("all://localhost", "all://127.0.0.1", "all://[::1]")),
        headers={"User-Agent": "lazy-snapshotter", "Accept-Encoding": "identity"},
    )


class RegistrySource(ManifestSource):
    """An image in a registry."""

    def __init__(
        self,
        reference: RegistryReference,
        client: httpx.AsyncClient,
        *,
        credentials: Credentials | None = None,
        backoff_s: float = 0.25,
    ) -> None:
        super().__init__(str(reference))
        self._reference = reference
        self._client = client
        self._credentials = credentials
        self._backoff_s = backoff_s
        self._authorization: str | None = None
        host = _DOCKER_HUB if reference.host == DEFAULT_REGISTRY else reference.host
        scheme = "http" if _is_loopback(httpx.URL(f"//{host}").host) else "https"
        self._base = f"{scheme}://{host}/v2/{reference.repository}"

    async def _top(self, architecture: str) -> bytes:
        what = f"manifest of {self.name}"
        data, stated = await self._get_manifest(self._reference.target, what)
        if self._reference.digest is not None:
            return check_blob(data, self._reference.digest, what)
        return check_blob(data, stated, what) if stated else data

    async def _manifest(self, descriptor: Descriptor) -> bytes:
        what = f"manifest {descriptor.digest} of {self.name}"
        return (await self._get_manifest(descriptor.digest, what))[0]

    async def _config(self, descriptor: Descriptor) -> bytes:
        what = f"config of {self.name}"
        url = f"{self._base}/blobs/{descriptor.digest}"

        async def attempt() -> bytes:
            async with self._request(url, what) as response:
                return await _bounded(response, MAX_CONFIG_BYTES, what)

        return await self._retrying(attempt, what)

    async def _get_manifest(self, target: str, what: str) -> tuple[bytes, str]:
        """The manifest and the digest that the registry states for it, which may be empty."""

        async def attempt() -> tuple[bytes, str]:
            headers = {"Accept": _ACCEPT}
            async with self._request(f"{self._base}/manifests/{target}", what, headers) as response:
                data = await _bounded(response, MAX_MANIFEST_BYTES, what)
                stated = response.headers.get("Docker-Content-Digest", "")
                return data, stated if stated.startswith("sha256:") else ""

        return await self._retrying(attempt, what)

    @asynccontextmanager
    async def open_blob(self, descriptor: BlobDescriptor) -> AsyncIterator[AsyncIterator[bytes]]:
        """The blob's bytes, in pieces as they arrive."""
        pieces = self._blob_pieces(descriptor)
        try:
            yield pieces
        finally:
            await pieces.aclose()

    async def _blob_pieces(self, descriptor: BlobDescriptor) -> AsyncGenerator[bytes, None]:
        what = f"layer {descriptor.digest} of {self.name}"
        url = f"{self._base}/blobs/{descriptor.digest}"
        done, failures = 0, 0
        while True:
            try:
                headers = {"Range": f"bytes={done}-"} if done else {}
                async with self._request(url, what, headers) as response:
                    skip = done if response.status_code == httpx.codes.OK else 0
                    async for piece in response.aiter_raw():
                        fresh = piece[skip:]
                        skip -= len(piece) - len(fresh)
                        if fresh:
                            done += len(fresh)
                            failures = 0
                            yield fresh
                return
            except (_TryAgain, httpx.TransportError) as error:
                failures += 1
                if done >= descriptor.size:
                    return
                await self._pause(failures, error, what)

    async def _retrying(self, attempt: Callable[[], Awaitable[T]], what: str) -> T:
        failures = 0
        while True:
            try:
                return await attempt()
            except (_TryAgain, httpx.TransportError) as error:
                failures += 1
                await self._pause(failures, error, what)

    async def _pause(self, failures: int, error: Exception, what: str) -> None:
        """Waits before the next try; UnavailableError once there were enough."""
        if failures >= _ATTEMPTS:
            cause = str(error) or type(error).__name__
            raise UnavailableError(
                f"{what}: {self._reference.host} failed {failures} times, last: {cause}"
            ) from error
        wished_s = error.after_s if isinstance(error, _TryAgain) else 0.0
        await asyncio.sleep(max(self._backoff_s * 2 ** (failures - 1), wished_s))

    @asynccontextmanager
    async def _request(
        self, url: str, what: str, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[httpx.Response]:
        """A successful answer to GET, after authorization where the registry wants it."""
        for is_last in (False, True):
            sent = dict(headers or {})
            if self._authorization:
                sent["Authorization"] = self._authorization
            async with self._stream(url, sent, what) as response:
                if response.status_code != httpx.codes.UNAUTHORIZED or is_last:
                    self._check(response, what)
                    yield response
                    return
                challenge = response.headers.get("WWW-Authenticate", "")
            self._authorization = await self._authorize(challenge, what)

    @asynccontextmanager
    async def _stream(
        self, url: str, headers: Mapping[str, str], what: str
    ) -> AsyncIterator[httpx.Response]:
        try:
            async with self._client.stream("GET", url, headers=headers) as response:
                yield response
        except (httpx.TooManyRedirects, httpx.InvalidURL, httpx.DecodingError) as error:
            raise UnavailableError(f"{what}: {self._reference.host}: {error}") from error

    def _check(self, response: httpx.Response, what: str) -> None:
        status = response.status_code
        where = f"{what}: {response.url.host} answered {status} {response.reason_phrase}"
        if status in (httpx.codes.OK, httpx.codes.PARTIAL_CONTENT):
            return
        if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise AccessDeniedError(
                f"{where}; the image may be private (give credentials) or not exist"
            )
        if status == httpx.codes.NOT_FOUND:
            raise NotFoundError(f"{where}; check the name and the tag")
        if status == httpx.codes.TOO_MANY_REQUESTS or status >= 500:
            raise _TryAgain(where, _retry_after_s(response))
        raise UnavailableError(where)

    async def _authorize(self, challenge: str, what: str) -> str:
        """The Authorization header that answers a WWW-Authenticate one."""
        scheme, _, rest = challenge.partition(" ")
        parameters = dict(_PARAMETER.findall(rest))
        if scheme.lower() == "basic" and self._credentials is not None:
            return _basic(self._credentials)
        if scheme.lower() != "bearer" or "realm" not in parameters:
            raise AccessDeniedError(
                f"{what}: {self._reference.host} wants credentials"
                f" ({scheme or 'of an unknown kind'}), and there are none for it"
            )
        scope = parameters.get("scope") or f"repository:{self._reference.repository}:pull"
        query = {"scope": scope}
        if "service" in parameters:
            query["service"] = parameters["service"]
        url = str(httpx.URL(parameters["realm"]).copy_merge_params(query))
        headers = {"Authorization": _basic(self._credentials)} if self._credentials else {}

        async with self._stream(url, headers, what) as response:
            self._check(response, f"token for {what}")
            body = await _bounded(response, _MAX_TOKEN_BYTES, f"token for {what}")
        try:
            token = msgspec.json.decode(body, type=_Token)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise UnavailableError(f"token for {what}: {error}") from error
        return f"Bearer {token.token or token.access_token}"


class _Token(msgspec.Struct):
    token: str = ""
    access_token: str = ""


async def _bounded(response: httpx.Response, limit: int, what: str) -> bytes:
    """The whole body; InvalidInputError as soon as it is longer than ``limit``."""
    data = bytearray()
    async for piece in response.aiter_raw():
        data += piece
        if len(data) > limit:
            raise InvalidInputError(f"{what}: larger than {limit} bytes")
    return bytes(data)


async def _refuse_plain_http(request: httpx.Request) -> None:
    if request.url.scheme != "https" and not _is_loopback(request.url.host):
        raise AccessDeniedError(
            f"GET {request.url}: only registries on loopback are asked over plain HTTP"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _retry_after_s(response: httpx.Response) -> float:
    """The Retry-After header in seconds, bounded; dates and nonsense count as none."""
    text = response.headers.get("Retry-After", "")
    return min(float(text), _MAX_RETRY_AFTER_S) if text.isdecimal() else 0.0


def _basic(credentials: Credentials) -> str:
    return "Basic " + base64.b64encode(":".join(credentials).encode()).decode()
