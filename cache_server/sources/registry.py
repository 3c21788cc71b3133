"""Registries that speak the OCI distribution API (Docker's HTTP API v2).

Transport failures, stalls, 429 and 5xx are tried again a few times; a blob that breaks off goes on
where it stopped. How they are reached is ``network``'s, who is asking ``authorization``'s.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

import httpx

from cache_server.library import BlobDescriptor
from cache_server.sources.authorization import Authorization
from cache_server.sources.credentials import Keyring
from cache_server.sources.manifest import (
    INDEX_TYPES,
    MANIFEST_TYPES,
    MAX_CONFIG_BYTES,
    MAX_MANIFEST_BYTES,
    Descriptor,
    check_blob,
)
from cache_server.sources.network import Network
from cache_server.sources.reference import DEFAULT_REGISTRY, RegistryReference
from cache_server.sources.retrying import PASSING, Patience, TryAgain, retry_after_s
from cache_server.sources.source import ManifestSource
from snapshotter.errors import (
    AccessDeniedError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
)

T = TypeVar("T")
_DOCKER_HUB = "registry-1.docker.io"
_PROGRESS_BYTES = 64 << 10
"""A download that gets so far is not failing; less, and it might never end."""
_CONTENT_RANGE = re.compile(r"bytes (\d+)-")
_ACCEPT = ", ".join((*MANIFEST_TYPES, *INDEX_TYPES))


class RegistrySource(ManifestSource):
    """An image in a registry."""

    def __init__(
        self,
        reference: RegistryReference,
        network: Network,
        *,
        keyring: Keyring,
        backoff_s: float = 0.25,
    ) -> None:
        super().__init__(str(reference))
        self._reference = reference
        self._client = network.client
        self._authorization = Authorization(reference, network.client, keyring)
        self._backoff_s = backoff_s
        host = _DOCKER_HUB if reference.host == DEFAULT_REGISTRY else reference.host
        self._base = f"{network.scheme_of(host)}://{host}/v2/{reference.repository}"

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
        patience = Patience(what, backoff_s=self._backoff_s)
        done = counted = 0
        while True:
            try:
                headers = {"Range": f"bytes={done}-"} if done else {}
                async with self._request(url, what, headers) as response:
                    skip = _skipped_bytes(response, done)
                    async for piece in response.aiter_raw():
                        fresh = piece[skip:]
                        skip -= len(piece) - len(fresh)
                        if fresh:
                            done += len(fresh)
                            yield fresh
                return
            except PASSING as error:
                if done >= descriptor.size:
                    return
                if done - counted >= _PROGRESS_BYTES:
                    patience.renew()
                    counted = done
                await patience.pause(error)

    async def _retrying(self, attempt: Callable[[], Awaitable[T]], what: str) -> T:
        patience = Patience(what, backoff_s=self._backoff_s)
        while True:
            try:
                return await attempt()
            except PASSING as error:
                await patience.pause(error)

    @asynccontextmanager
    async def _request(
        self, url: str, what: str, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[httpx.Response]:
        """A successful answer to GET, after authorization where the registry wants it."""
        for is_last in (False, True):
            sent = dict(headers or {})
            if self._authorization.header:
                sent["Authorization"] = self._authorization.header
            async with self._stream(url, sent, what) as response:
                if response.status_code != httpx.codes.UNAUTHORIZED or is_last:
                    self._check(response, what)
                    yield response
                    return
            await self._authorization.answer(response, what)

    @asynccontextmanager
    async def _stream(
        self, url: str, headers: Mapping[str, str], what: str
    ) -> AsyncIterator[httpx.Response]:
        try:
            async with self._client.stream("GET", url, headers=headers) as response:
                yield response
        except (httpx.TooManyRedirects, httpx.InvalidURL, httpx.DecodingError) as error:
            raise UnavailableError(f"{what}: {self._reference.host}: {error}") from error
        except httpx.ConnectError as error:
            if (advice := self._tls_advice(str(error))) is not None:
                raise UnavailableError(f"{what}: {error}; {advice}") from error
            raise

    def _tls_advice(self, failure: str) -> str | None:
        """What to do where TLS cannot be; None for failures that may pass."""
        host = self._reference.host
        if "CERTIFICATE_VERIFY_FAILED" in failure:
            return f"if it is to be trusted, put its CA into /etc/docker/certs.d/{host}/ca.crt"
        if "CERTIFICATE_REQUIRED" in failure or "HANDSHAKE_FAILURE" in failure:
            return (
                "it may want a certificate of yours: put it into"
                f" /etc/docker/certs.d/{host}/client.cert and client.key"
            )
        if "WRONG_VERSION_NUMBER" in failure or "record layer failure" in failure:
            return f"if it is to be asked in plain HTTP, name it: --insecure-registry {host}"
        return None

    def _check(self, response: httpx.Response, what: str) -> None:
        status = response.status_code
        where = f"{what}: {response.url.host} answered {status} {response.reason_phrase}".rstrip()
        if status in (httpx.codes.OK, httpx.codes.PARTIAL_CONTENT):
            return
        if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise AccessDeniedError(f"{where}; {self._authorization.advice()}")
        if status == httpx.codes.NOT_FOUND:
            raise NotFoundError(
                f"{where}; is there {self._reference.repository!r} with"
                f" {self._reference.target!r} at {self._reference.host}?"
            )
        if status == httpx.codes.TOO_MANY_REQUESTS:
            raise TryAgain(f"{where} (many allow more after docker login)", _wish_s(response))
        if status >= 500:
            raise TryAgain(where, _wish_s(response))
        if status == httpx.codes.BAD_REQUEST and response.url.scheme == "http":
            host = self._reference.host
            where += f"; if it speaks TLS, put its CA into /etc/docker/certs.d/{host}/ca.crt"
        raise UnavailableError(where)


def _skipped_bytes(response: httpx.Response, done: int) -> int:
    """How much of the answer was got before: all of it where the server ignores ranges."""
    if response.status_code == httpx.codes.OK:
        return done
    stated = _CONTENT_RANGE.match(response.headers.get("Content-Range", ""))
    if stated is not None and int(stated[1]) != done:
        raise TryAgain(f"asked for bytes from {done}, it sent those from {stated[1]}")
    return 0


def _wish_s(response: httpx.Response) -> float:
    return retry_after_s(response.headers.get("Retry-After", ""))


async def _bounded(response: httpx.Response, limit: int, what: str) -> bytes:
    """The whole body; InvalidInputError as soon as it is longer than ``limit``."""
    data = bytearray()
    async for piece in response.aiter_raw():
        data += piece
        if len(data) > limit:
            raise InvalidInputError(f"{what}: larger than {limit} bytes")
    return bytes(data)
