import pytest

from cache_server.sources.reference import LocalReference, RegistryReference, parse_reference
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
        ("oci:/srv/images", LocalReference("oci", "/srv/images")),
        ("oci:/srv/images/:v1", LocalReference("oci", "/srv/images", "v1")),
        ("oci:/srv/images:host/name:v1", LocalReference("oci", "/srv/images", "host/name:v1")),
        ("oci-archive:/a.tar", LocalReference("oci-archive", "/a.tar")),
        ("oci-archive:/a.tar:v1", LocalReference("oci-archive", "/a.tar", "v1")),
        ("docker-archive:/a.tar", LocalReference("docker-archive", "/a.tar")),
        (
            "docker-archive:/a.tar:debian",
            LocalReference("docker-archive", "/a.tar", "docker.io/library/debian:latest"),
        ),
        (
            "docker-archive:/a.tar:localhost/x:1",
            LocalReference("docker-archive", "/a.tar", "localhost/x:1"),
        ),
    ],
)
def test_parses_and_prints_back(text: str, expected: RegistryReference | LocalReference) -> None:
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
        "oci-archive:relative.tar",
        "docker-archive:/a.tar:",
        "docker-archive:/a.tar:UPPER/x:1 ",
        f"docker-archive:/a.tar:debian@{DIGEST}",
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
