import base64
import json
from pathlib import Path

import pytest

from cache_server.sources.credentials import find_credentials
from cache_server.sources.reference import RegistryReference, parse_reference
from snapshotter.errors import InvalidInputError, NotFoundError


def reference(text: str) -> RegistryReference:
    parsed = parse_reference(text)
    assert isinstance(parsed, RegistryReference)
    return parsed


def authfile(directory: Path, entries: dict[str, str]) -> str:
    encoded = {
        key: {"auth": base64.b64encode(value.encode()).decode()} for key, value in entries.items()
    }
    path = directory / "auth.json"
    path.write_text(json.dumps({"auths": encoded, "credHelpers": {}}))
    return str(path)


def test_most_specific_entry_wins(tmp_path: Path) -> None:
    path = authfile(tmp_path, {"q.io": "host:1", "q.io/team": "team:2", "q.io/team/x": "x:3"})
    assert find_credentials(path, reference("q.io/team/x:v1")) == ("x", "3")
    assert find_credentials(path, reference("q.io/team/y")) == ("team", "2")
    assert find_credentials(path, reference("q.io/other")) == ("host", "1")
    assert find_credentials(path, reference("other.io/team/x")) is None


def test_password_may_have_colons_and_docker_hub_its_old_key(tmp_path: Path) -> None:
    path = authfile(tmp_path, {"https://index.docker.io/v1/": "me:a:b"})
    assert find_credentials(path, reference("debian")) == ("me", "a:b")


def test_unreadable_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"none\.json"):
        find_credentials(str(tmp_path / "none.json"), reference("debian"))


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"auths":[]}',
        '{"auths":{"q.io":{"auth":"secret!"}}}',
        '{"auths":{"q.io":{"auth":"c2VjcmV0"}}}',
    ],
)
def test_malformed_is_refused_without_showing_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "auth.json"
    path.write_text(text)
    with pytest.raises(InvalidInputError) as caught:
        find_credentials(str(path), reference("q.io/a"))
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None
