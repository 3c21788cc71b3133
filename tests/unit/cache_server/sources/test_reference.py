import pytest

from cache_server.sources.reference import LayoutReference, RegistryReference, parse_reference
from snapshotter.errors import InvalidInputError

DIGEST = "sha256:" + "ab" * 32


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("debian", RegistryReference("docker.io", "library/debian", "latest")),
        ("debian:12", RegistryReference("docker.io", "library/debian", "12")),
        ("docker://debian", RegistryReference("docker.io", "library/debian", "latest")),
        ("docker.io/debian", RegistryReference("docker.io", "library/debian", "latest")),
        ("index.docker.io/a/b:c", RegistryReference("docker.io", "a/b", "c")),
        ("user/tool", RegistryReference("docker.io", "user/tool", "latest")),
        ("localhost/x", RegistryReference("localhost", "x", "latest")),
        ("127.0.0.1:5000/a/b_c--d:T.1", RegistryReference("127.0.0.1:5000", "a/b_c--d", "T.1")),
        ("[::1]:5000/a", RegistryReference("[::1]:5000", "a", "latest")),
        (f"ghcr.io/a/b@{DIGEST}", RegistryReference("ghcr.io", "a/b", None, DIGEST)),
        (f"docker://q.io/a:t@{DIGEST}", RegistryReference("q.io", "a", "t", DIGEST)),
        ("oci:/srv/images", LayoutReference("/srv/images")),
        ("oci:/srv/images/:v1", LayoutReference("/srv/images", "v1")),
        ("oci:/srv/images:host/name:v1", LayoutReference("/srv/images", "host/name:v1")),
    ],
)
def test_parses_and_prints_back(text: str, expected: RegistryReference | LayoutReference) -> None:
    parsed = parse_reference(text)
    assert parsed == expected
    assert parse_reference(str(parsed)) == parsed


def test_digest_decides_over_tag() -> None:
    parsed = parse_reference(f"q.io/a:t@{DIGEST}")
    assert isinstance(parsed, RegistryReference)
    assert parsed.target == DIGEST


@pytest.mark.parametrize(
    "text",
    [
        "",
        "docker://",
        "docker://host.io/",
        "UPPER/case:x y",
        "docker.io/Upper",
        "a//b",
        "a/../b",
        "a:",
        "a:-tag",
        "a@sha256:12",
        f"a@sha512:{'0' * 128}",
        "a" * 256,
        "host:port/a",
        "oci:relative/dir:v1",
        "oci:",
        "oci:/dir:",
        "docker-daemon:debian:12",
        "containers-storage:debian",
        "dir:/srv",
        "docker:debian:12",
        "https://docker.io/library/debian",
        "a\0b",
    ],
)
def test_refuses(text: str) -> None:
    with pytest.raises(InvalidInputError):
        parse_reference(text)


def test_another_transport_is_told_what_is_accepted() -> None:
    with pytest.raises(InvalidInputError, match=r"docker-daemon.*docker://HOST.*oci:"):
        parse_reference("docker-daemon:debian:12")
