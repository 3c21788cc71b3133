import pytest

from cache_server.sources.reference import parse_reference
from snapshotter.errors import InvalidInputError
from snapshotter.references import absolute_image, registry_name


@pytest.mark.parametrize(
    ("image", "absolute"),
    [
        ("debian:12", "debian:12"),
        ("oci:x:latest", "oci:/here/x:latest"),
        ("oci:../x", "oci:/x"),
        ("oci:/abs/x:1", "oci:/abs/x:1"),
        ("oci-archive:a.tar:v", "oci-archive:/here/a.tar:v"),
        ("docker-archive:a.tar:name:tag", "docker-archive:/here/a.tar:name:tag"),
        ("docker://debian:12", "docker://debian:12"),
        ("oci:", "oci:"),
        ("3", "3"),
    ],
)
def test_paths_of_local_images_are_made_absolute(image: str, absolute: str) -> None:
    assert absolute_image(image, "/here") == absolute


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("debian", "docker.io/library/debian:latest"),
        ("docker://debian:12", "docker.io/library/debian:12"),
        ("index.docker.io/team/app", "docker.io/team/app:latest"),
        ("team/app:v1", "docker.io/team/app:v1"),
        ("localhost/app", "localhost/app:latest"),
        ("127.0.0.1:5000/a/b/c:v1", "127.0.0.1:5000/a/b/c:v1"),
        ("quay.io/app@sha256:" + "a" * 64, "quay.io/app@sha256:" + "a" * 64),
        ("quay.io/app:v1@sha256:" + "a" * 64, "quay.io/app:v1@sha256:" + "a" * 64),
    ],
)
def test_registry_names_are_completed_as_the_cache_server_does(image: str, name: str) -> None:
    assert registry_name(image) == name
    assert str(parse_reference(image)) == f"docker://{name}"


@pytest.mark.parametrize("image", ["oci:dir:v1", "oci-archive:/a.tar", "docker-archive:a:b:c"])
def test_local_images_have_no_name_in_a_registry(image: str) -> None:
    with pytest.raises(InvalidInputError, match="only images of registries"):
        registry_name(image)
