import pytest

from snapshotter.errors import InvalidInputError, UnsupportedError
from snapshotter.platforms import host_architecture, parse_platform


@pytest.mark.parametrize(
    ("text", "architecture"),
    [
        ("linux/amd64", "amd64"),
        ("amd64", "amd64"),
        ("linux/arm/v7", "arm/v7"),
        ("arm64/v8", "arm64/v8"),
    ],
)
def test_parses(text: str, architecture: str) -> None:
    assert parse_platform(text) == architecture


def test_host_has_a_platform() -> None:
    assert parse_platform(host_architecture()) == host_architecture()


@pytest.mark.parametrize("text", ["windows/amd64", "darwin/arm64", "freebsd/amd64"])
def test_other_systems_are_told(text: str) -> None:
    with pytest.raises(UnsupportedError, match="linux alone"):
        parse_platform(text)


@pytest.mark.parametrize(
    "text", ["", "linux", "linux/", "/amd64", "a/b/c", "linux/a/b/c", "A", "a b"]
)
def test_refuses(text: str) -> None:
    with pytest.raises(InvalidInputError, match="linux/ARCH"):
        parse_platform(text)
