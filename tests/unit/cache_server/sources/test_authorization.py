"""Challenges of a registry and how they are answered, through the source that meets them."""

import asyncio
import json
from urllib.parse import parse_qs

import pytest

from cache_server.sources.authorization import _parsed_challenges
from cache_server.sources.credentials import Credentials
from snapshotter.errors import AccessDeniedError, UnavailableError
from tests.support.http_faults import Reply, Seen, scripted
from tests.unit.cache_server.sources.test_registry import (
    IMAGE,
    LAYER,
    LAYER_BLOB,
    PASSWORD,
    KnownKeyring,
    resolve,
    serve_image,
    source_of,
)

ORIGIN = "/known.json (it)"
IDENTITY = Credentials("<token>", "refresh-me", ORIGIN, is_identity_token=True)
BEARER = Credentials("", "ready", ORIGIN, is_bearer=True)


def test_anonymous_token_is_fetched_once_and_sent() -> None:
    def answer(request: Seen) -> Reply:
        if request.path.startswith("/token"):
            assert "Authorization" not in request.headers
            return Reply(body=json.dumps({"token": "T1"}).encode())
        if request.headers.get("Authorization") != "Bearer T1":
            challenge = f'Bearer realm="http://{server.address}/token",service="reg"'
            return Reply(401, headers={"WWW-Authenticate": challenge})
        return serve_image(request)

    with scripted(answer) as server:
        assert resolve(f"{server.address}/a/b:v1").digest == IMAGE.digest
    tokens = [seen.path for seen in server.seen if seen.path.startswith("/token")]
    assert tokens == ["/token?scope=repository%3Aa%2Fb%3Apull&service=reg"]


def test_credentials_go_to_the_token_service_alone() -> None:
    def answer(request: Seen) -> Reply:
        authorization = request.headers.get("Authorization", "")
        if request.path.startswith("/token"):
            assert authorization == "Basic dTpw"
            return Reply(body=b'{"access_token":"T2"}')
        assert not authorization.startswith("Basic")
        if authorization != "Bearer T2":
            realm = f'Bearer realm="http://{server.address}/token"'
            return Reply(401, headers={"WWW-Authenticate": realm})
        return serve_image(request)

    with scripted(answer) as server:
        assert resolve(f"{server.address}/a:v1", credentials=PASSWORD).digest == IMAGE.digest


@pytest.mark.parametrize("challenge", ["", 'Basic realm="x"', 'Bearer service="x"'])
def test_unanswerable_challenge_is_access_denied(challenge: str) -> None:
    def answer(_: Seen) -> Reply:
        return Reply(401, headers={"WWW-Authenticate": challenge})

    with scripted(answer) as server, pytest.raises(AccessDeniedError, match="credentials"):
        resolve(f"{server.address}/a:v1")


def test_token_that_is_refused_again_is_access_denied_not_a_loop() -> None:
    def answer(request: Seen) -> Reply:
        if request.path.startswith("/token"):
            return Reply(body=b'{"token":"stale"}')
        realm = f'Bearer realm="http://{server.address}/token"'
        return Reply(401, headers={"WWW-Authenticate": realm})

    with scripted(answer) as server, pytest.raises(AccessDeniedError):
        resolve(f"{server.address}/a:v1")
    assert len(server.seen) == 3


BEARER_PART = 'Bearer realm="http://h/token",service="reg",scope="repository:a:pull,push"'


@pytest.mark.parametrize(
    "challenges",
    [
        [BEARER_PART],
        ['bearer scope="repository:a:pull,push", Realm="http://h/token" ,service=reg'],
        ['Basic realm="x", ' + BEARER_PART],
        [BEARER_PART + ', Basic realm="x"'],
        ["Negotiate", BEARER_PART],
        ["Negotiate, " + BEARER_PART],
    ],
)
def test_challenges_of_any_form(challenges: list[str]) -> None:
    parsed = _parsed_challenges(challenges)
    assert parsed["bearer"] == {
        "realm": "http://h/token",
        "service": "reg",
        "scope": "repository:a:pull,push",
    }
    assert parsed.get("basic", {"realm": "x"}) == {"realm": "x"}


def test_identity_token_is_exchanged_by_post() -> None:
    def answer(request: Seen) -> Reply:
        if request.path == "/token?account=x":
            assert request.method == "POST"
            assert parse_qs(request.body.decode()) == {
                "grant_type": ["refresh_token"],
                "client_id": ["lazy-snapshotter"],
                "refresh_token": ["refresh-me"],
                "scope": ["repository:a:pull"],
                "service": ["reg"],
            }
            return Reply(body=b'{"access_token":"T3","expires_in":300}')
        if request.headers.get("Authorization") != "Bearer T3":
            realm = f'Bearer realm="http://{server.address}/token?account=x",service="reg"'
            return Reply(401, headers={"WWW-Authenticate": realm})
        return serve_image(request)

    with scripted(answer) as server:
        assert resolve(f"{server.address}/a:v1", credentials=IDENTITY).digest == IMAGE.digest


def test_redirect_of_the_token_service_is_not_followed() -> None:
    with scripted(lambda _: Reply(body=b'{"token":"x"}')) as elsewhere:

        def answer(request: Seen) -> Reply:
            if request.path.startswith("/token"):
                return Reply(307, headers={"Location": f"http://{elsewhere.address}/token"})
            realm = f'Bearer realm="http://{server.address}/token"'
            return Reply(401, headers={"WWW-Authenticate": realm})

        with scripted(answer) as server, pytest.raises(UnavailableError, match="307"):
            resolve(f"{server.address}/a:v1", credentials=IDENTITY)
        assert elsewhere.seen == []


def test_token_service_in_plain_http_elsewhere_gets_nothing() -> None:
    realm = 'Bearer realm="http://192.0.2.1/token"'
    refusal = Reply(401, headers={"WWW-Authenticate": realm})
    with (
        scripted(lambda _: refusal) as server,
        pytest.raises(AccessDeniedError, match="plain HTTP"),
    ):
        resolve(f"{server.address}/a:v1", credentials=PASSWORD)


@pytest.mark.parametrize(
    "body", [b"{}", b"<html>", b'{"token":""}', b'{"token":"a\\nb"}', b"[" * 99_999]
)
def test_token_service_without_a_token_is_unavailable(body: bytes) -> None:
    def answer(request: Seen) -> Reply:
        if request.path.startswith("/token"):
            return Reply(body=body)
        realm = f'Bearer realm="http://{server.address}/token"'
        return Reply(401, headers={"WWW-Authenticate": realm})

    with scripted(answer) as server, pytest.raises(UnavailableError, match="there is none"):
        resolve(f"{server.address}/a:v1")


def test_ready_token_is_sent_as_it_is() -> None:
    def answer(request: Seen) -> Reply:
        if request.headers.get("Authorization") != "Bearer ready":
            realm = f'Bearer realm="http://{server.address}/token"'
            return Reply(401, headers={"WWW-Authenticate": realm})
        return serve_image(request)

    with scripted(answer) as server:
        assert resolve(f"{server.address}/a:v1", credentials=BEARER).digest == IMAGE.digest


def test_basic_credentials_and_what_is_said_when_they_are_refused() -> None:
    def answer(request: Seen) -> Reply:
        if request.headers.get("Authorization") != "Basic dTpw":
            return Reply(401, headers={"WWW-Authenticate": 'Basic realm="r"'})
        return serve_image(request)

    wrong = Credentials("u", "swordfish", ORIGIN)
    with scripted(answer) as server:
        assert resolve(f"{server.address}/a:v1", credentials=PASSWORD).digest == IMAGE.digest
        said = r"401.*credentials of /known\.json \(it\) do not suffice.*docker login 127\.0\.0\.1"
        with pytest.raises(AccessDeniedError, match=said) as caught:
            resolve(f"{server.address}/a:v1", credentials=wrong)
        assert "swordfish" not in str(caught.value)
        with pytest.raises(AccessDeniedError, match=r"no credentials for it in /known\.json"):
            resolve(f"{server.address}/a:v1")


def test_expired_token_is_renewed_once_for_all_requests() -> None:
    valid = ["T0"]
    given: list[str] = []

    def answer(request: Seen) -> Reply:
        if request.path.startswith("/token"):
            given.append(valid[0])
            return Reply(body=json.dumps({"token": valid[0]}).encode())
        if request.headers.get("Authorization") != f"Bearer {valid[0]}":
            realm = f'Bearer realm="http://{server.address}/token"'
            return Reply(401, headers={"WWW-Authenticate": realm})
        return serve_image(request)

    async def run() -> None:
        async with source_of(f"{server.address}/a:v1") as source:
            await source.resolve("amd64")
            valid[0] = "T1"

            async def download() -> bytes:
                async with source.open_blob(LAYER_BLOB) as pieces:
                    return b"".join([piece async for piece in pieces])

            assert set(await asyncio.gather(*(download() for _ in range(4)))) == {LAYER.blob}

    with scripted(answer) as server:
        asyncio.run(run())
    assert given == ["T0", "T1"]


def test_public_images_need_no_look_for_credentials() -> None:
    async def run() -> int:
        async with source_of(f"{server.address}/a:v1") as source:
            await source.resolve("amd64")
            keyring = source._authorization._keyring
            assert isinstance(keyring, KnownKeyring)
            return keyring.asked

    with scripted(serve_image) as server:
        assert asyncio.run(run()) == 0
