import pytest

from snapshotter.references import absolute_image


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
