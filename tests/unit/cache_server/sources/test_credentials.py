import asyncio
import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cache_server.sources.credentials import Credentials, Keyring
from cache_server.sources.reference import RegistryReference, parse_reference
from snapshotter.errors import AccessDeniedError, InvalidInputError, NotFoundError


def reference(text: str) -> RegistryReference:
    parsed = parse_reference(text)
    assert isinstance(parsed, RegistryReference)
    return parsed


def authfile(path: Path, auths: Mapping[str, str | Mapping[str, str]], **fields: Any) -> str:
    entries = {
        key: {"auth": base64.b64encode(value.encode()).decode()}
        if isinstance(value, str)
        else value
        for key, value in auths.items()
    }
    path.write_text(json.dumps({"auths": entries, **fields}))
    return str(path)


def find(path: str, text: str) -> Credentials | None:
    return asyncio.run(Keyring(path).find(reference(text)))


def pair(path: str, text: str) -> tuple[str, str] | None:
    found = find(path, text)
    return (found.user, found.secret) if found else None


def test_most_specific_entry_wins(tmp_path: Path) -> None:
    entries = {"q.io": "host:1", "q.io/team": "team:2", "q.io/team/x": "x:3"}
    path = authfile(tmp_path / "auth.json", entries)
    assert pair(path, "q.io/team/x:v1") == ("x", "3")
    assert pair(path, "q.io/team/y") == ("team", "2")
    assert pair(path, "q.io/team/x2/z") == ("team", "2")
    assert pair(path, "q.io/other") == ("host", "1")
    assert pair(path, "other.io/team/x") is None


@pytest.mark.parametrize(
    "key", ["docker.io", "index.docker.io", "https://index.docker.io/v1/", "docker.io/library"]
)
def test_docker_hub_by_all_its_names(tmp_path: Path, key: str) -> None:
    path = authfile(tmp_path / "auth.json", {key: "me:a:b"})
    assert pair(path, "debian") == ("me", "a:b")


def test_addresses_of_old_dockers_name_a_registry(tmp_path: Path) -> None:
    path = authfile(tmp_path / "a", {"https://q.io:5000/v1/": "old:1", "http://q.io": "plain:2"})
    assert pair(path, "q.io:5000/x") == ("old", "1")
    assert pair(path, "q.io/x") == ("plain", "2")
    assert pair(path, "q.io:5001/x") is None


def test_tokens_are_told_from_passwords(tmp_path: Path) -> None:
    auth = base64.b64encode(b"00000000:").decode()
    entries = {
        "id.io": {"auth": auth, "identitytoken": "I"},
        "bearer.io": {"registrytoken": "R"},
        "plain.io": {"username": "u", "password": "p"},
        "empty.io": {},
    }
    path = authfile(tmp_path / "auth.json", entries)
    identity, bearer, plain = (find(path, f"{name}.io/x") for name in ("id", "bearer", "plain"))
    assert identity is not None
    assert bearer is not None
    assert plain is not None
    assert (identity.secret, identity.is_identity_token, identity.is_bearer) == ("I", True, False)
    assert (bearer.secret, bearer.is_identity_token, bearer.is_bearer) == ("R", False, True)
    assert (plain.user, plain.secret, plain.is_bearer) == ("u", "p", False)
    assert find(path, "empty.io/x") is None


def test_secret_is_not_shown(tmp_path: Path) -> None:
    path = authfile(tmp_path / "auth.json", {"q.io": "me:swordfish"})
    assert "swordfish" not in repr(find(path, "q.io/x"))


def test_usual_files_are_looked_at_in_order_and_may_be_missing(tmp_path: Path) -> None:
    one = authfile(tmp_path / "one", {"a.io": "first:1"})
    two = authfile(tmp_path / "two", {"a.io": "second:2", "b.io": "second:2"})
    keyring = Keyring(usual=[str(tmp_path / "none"), one, two])

    async def run() -> list[Credentials | None]:
        return [await keyring.find(reference(f"{name}.io/x")) for name in ("a", "b", "c")]

    a, b, c = asyncio.run(run())
    assert a == Credentials("first", "1", f"{one} (a.io)")
    assert b == Credentials("second", "2", f"{two} (b.io)")
    assert c is None


def test_authfile_that_was_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"none\.json"):
        Keyring(str(tmp_path / "none.json"))
    with pytest.raises(InvalidInputError, match="Is a directory"):
        Keyring(str(tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"auths":["secret"]}',
        '{"auths":{"q.io":{"auth":"secret!"}}}',
        '{"auths":{"q.io":{"auth":"c2VjcmV0"}}}',
        '{"credHelpers":{"q.io":"../secret"}}',
    ],
)
def test_malformed_is_refused_without_showing_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "auth.json"
    path.write_text(text)
    with pytest.raises(InvalidInputError) as caught:
        find(str(path), "q.io/a")
    assert "secret" not in str(caught.value).replace("../secret", "")
    assert caught.value.__cause__ is None


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A credential helper ``test`` on the PATH that knows two servers, and its log."""
    program = tmp_path / "bin" / "docker-credential-test"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\n"
        f'read -r server || true; echo "$1 $server" >> {tmp_path}/asked\n'
        'case "$server" in\n'
        '*q.io) echo \'{"ServerURL":"x","Username":"helped","Secret":"h"}\';;\n'
        '*index.docker.io/v1/) echo \'{"Username":"<token>","Secret":"T"}\';;\n'
        "locked.io) echo the keychain is locked; exit 1;;\n"
        "*) echo credentials not found in native keychain; exit 1;;\n"
        "esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return tmp_path / "asked"


def test_helper_of_a_registry_comes_before_its_entry(tmp_path: Path, helper: Path) -> None:
    path = authfile(tmp_path / "c", {"q.io": "file:1"}, credHelpers={"q.io": "test"})
    found = find(path, "q.io/x")
    assert found == Credentials("helped", "h", f"docker-credential-test, named in {path}")
    assert helper.read_text() == "get q.io\n"


def test_store_is_asked_for_what_has_no_entry(tmp_path: Path, helper: Path) -> None:
    path = authfile(tmp_path / "c", {"own.io": "file:1", "q.io": {}}, credsStore="test")
    assert pair(path, "own.io/x") == ("file", "1")
    assert pair(path, "q.io/x") == ("helped", "h")
    assert pair(path, "unknown.io/x") is None
    hub = find(path, "debian")
    assert hub is not None
    assert (hub.secret, hub.is_identity_token) == ("T", True)
    assert helper.read_text().splitlines()[-1] == "get https://index.docker.io/v1/"


def test_failing_helper_is_told_with_what_it_said(tmp_path: Path, helper: Path) -> None:
    path = authfile(tmp_path / "c", {}, credsStore="test", credHelpers={"q.io": "missing"})
    with pytest.raises(
        AccessDeniedError, match=r"locked\.io: failed \(1\): the keychain is locked"
    ):
        find(path, "locked.io/x")
    with pytest.raises(AccessDeniedError, match=r"docker-credential-missing .*PATH"):
        find(path, "q.io/x")
