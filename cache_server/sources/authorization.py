"""How a registry's challenge is answered: basic credentials, or a token of its token service.

The token services' ways are Docker's (distribution, "Token Authentication" and "OAuth2 Token
Authentication"). Credentials go to the registry, or to the token service that it names, and
nowhere else: requests to that service follow no redirects.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Mapping, Sequence

import httpx
import msgspec

from cache_server.sources.credentials import Credentials, Keyring
from cache_server.sources.reference import RegistryReference
from cache_server.sources.retrying import TryAgain, retry_after_s
from snapshotter.decoding import DECODE_ERRORS
from snapshotter.errors import AccessDeniedError, UnavailableError

_MAX_TOKEN_BYTES = 1 << 20
_CHALLENGE_PART = re.compile(r'(\w+)\s*=\s*(?:"([^"]*)"|([^\s",]+))|([A-Za-z]+)(?![^\s,])')
"""A parameter (name, quoted or bare value), or the name of a scheme (RFC 9110, 11.6.1)."""
_CLIENT_ID = "lazy-snapshotter"


class _Token(msgspec.Struct):
    token: str | None = None
    access_token: str | None = None


class Authorization:
    """The Authorization header for one repository: none until the registry asks for one."""

    def __init__(
        self, reference: RegistryReference, client: httpx.AsyncClient, keyring: Keyring
    ) -> None:
        self._reference = reference
        self._client = client
        self._keyring = keyring
        self._renewing = asyncio.Lock()
        self._credentials: Credentials | None = None
        self.header: str | None = None

    async def answer(self, response: httpx.Response, what: str) -> None:
        """Gets a header that answers a 401, unless another request got one meanwhile.

        Raises AccessDeniedError where that cannot be, whatever the keyring raises, UnavailableError
        or TryAgain.
        """
        refused = response.request.headers.get("Authorization")
        challenges = response.headers.get_list("WWW-Authenticate")
        async with self._renewing:
            if self.header is not None and self.header != refused:
                return
            self._credentials = await self._keyring.find(self._reference)
            self.header = await self._header(challenges, what)

    def advice(self) -> str:
        """What to do about a refusal, and where credentials were looked for."""
        host = self._reference.host
        if self._credentials is not None:
            return (
                f"the credentials of {self._credentials.origin} do not suffice:"
                f" log in again (docker login {host}), or ask for access"
            )
        looked = ", ".join(self._keyring.paths) or "no file"
        return (
            f"there are no credentials for it in {looked}: log in (docker login {host}) or name"
            " a file with --authfile, if the image exists"
        )

    async def _header(self, challenges: Sequence[str], what: str) -> str:
        found = self._credentials
        if found is not None and found.is_bearer:
            return f"Bearer {found.secret}"
        kinds = _parsed_challenges(challenges)
        if "realm" in kinds.get("bearer", {}):
            return f"Bearer {await self._token(kinds['bearer'], what)}"
        if "basic" in kinds and found is not None and not found.is_identity_token:
            return _basic(found)
        kind = " or ".join(kinds) or "of an unknown kind"
        raise AccessDeniedError(
            f"{what}: {self._reference.host} wants credentials ({kind}); {self.advice()}"
        )

    async def _token(self, parameters: Mapping[str, str], what: str) -> str:
        """An access token of the service that a Bearer challenge names."""
        fields = {
            "scope": parameters.get("scope") or f"repository:{self._reference.repository}:pull"
        }
        if "service" in parameters:
            fields["service"] = parameters["service"]
        found = self._credentials
        try:
            realm = httpx.URL(parameters["realm"])
        except httpx.InvalidURL as error:
            raise UnavailableError(f"token for {what}: realm {parameters['realm']!r}") from error
        if found is not None and found.is_identity_token:
            form = {
                "grant_type": "refresh_token",
                "client_id": _CLIENT_ID,
                "refresh_token": found.secret,
                **fields,
            }
            request = self._client.build_request("POST", realm, data=form)
        else:
            headers = {"Authorization": _basic(found)} if found else {}
            request = self._client.build_request(
                "GET", realm.copy_merge_params(fields), headers=headers
            )
        return self._parsed(await self._send(request, what), what)

    async def _send(self, request: httpx.Request, what: str) -> bytes:
        response = await self._client.send(request, stream=True, follow_redirects=False)
        try:
            status = response.status_code
            where = f"token for {what}: {request.url.host} answered {status}"
            if status in (httpx.codes.BAD_REQUEST, httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
                raise AccessDeniedError(f"{where}; {self.advice()}")
            if status == httpx.codes.TOO_MANY_REQUESTS or status >= 500:
                raise TryAgain(where, retry_after_s(response.headers.get("Retry-After", "")))
            if status != httpx.codes.OK:
                raise UnavailableError(where)
            data = bytearray()
            async for piece in response.aiter_raw():
                data += piece
                if len(data) > _MAX_TOKEN_BYTES:
                    raise UnavailableError(f"{where} with more than {_MAX_TOKEN_BYTES} bytes")
            return bytes(data)
        finally:
            await response.aclose()

    def _parsed(self, body: bytes, what: str) -> str:
        try:
            answer = msgspec.json.decode(body, type=_Token)
        except DECODE_ERRORS:
            answer = _Token()  # without the cause, which may quote a token
        token = answer.token or answer.access_token
        if not token or not token.isascii() or not token.isprintable():
            raise UnavailableError(f"token for {what}: there is none in the token service's answer")
        return token


def _parsed_challenges(lines: Sequence[str]) -> dict[str, dict[str, str]]:
    """The parameters of each scheme that WWW-Authenticate headers offer, in any number of lines."""
    schemes: dict[str, dict[str, str]] = {}
    for line in lines:
        parameters: dict[str, str] = {}
        for name, quoted, bare, scheme in _CHALLENGE_PART.findall(line):
            if scheme:
                parameters = schemes.setdefault(scheme.lower(), {})
            else:
                parameters.setdefault(name.lower(), quoted or bare)
    return schemes


def _basic(credentials: Credentials) -> str:
    pair = f"{credentials.user}:{credentials.secret}"
    return "Basic " + base64.b64encode(pair.encode()).decode()
