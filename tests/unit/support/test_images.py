"""The image fixtures are what they claim: skopeo and umoci read them."""

import io
import json
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.support.images import (
    Image,
    Layer,
    device,
    directory,
    file,
    hard_link,
    opaque,
    push,
    symlink,
    whiteout,
    write_layout,
)
from tests.support.registry import Registry


def test_tar_keeps_times_xattrs_and_byte_names() -> None:
    layer = Layer(
        [
            directory("d"),
            file(b"d/\xff", b"x", mtime_ns=-1, xattrs={"user.a": b"\x00\xfe"}),
            file("d/y", mtime_ns=1_000_000_001),
            symlink("l", "d/y"),
            hard_link("h", "d/y"),
            device("null", 1, 3, mode=0o666),
            whiteout("d/gone"),
            opaque("d"),
        ]
    )
    with tarfile.open(fileobj=io.BytesIO(layer.tar), errors="surrogateescape") as archive:
        members = {member.name: member for member in archive}
    odd = members["d/\udcff"]
    assert odd.pax_headers["mtime"] == "-0.000000001"
    assert odd.pax_headers["SCHILY.xattr.user.a"] == "\x00\udcfe"
    assert members["d/y"].pax_headers["mtime"] == "1.000000001"
    assert (members["null"].devmajor, members["null"].devminor) == (1, 3)
    assert "d/.wh.gone" in members
    assert "d/.wh..wh..opq" in members
    assert members["h"].islnk()


@pytest.mark.real
def test_registry_serves_what_was_pushed(registry: Registry, tmp_path: Path) -> None:
    images = [
        Image([Layer([file("a", b"1" * 1000)], compression=compression)], architecture=arch)
        for arch, compression in (("amd64", "zstd"), ("arm64", "none"))
    ]
    layout = write_layout(tmp_path / "oci", {"v1": images})
    digest = push(layout, "v1", registry.address, "support/images")
    shown = subprocess.run(
        [
            *("skopeo", "inspect", "--tls-verify=false", "--override-arch=arm64"),
            f"docker://{registry.address}/support/images:v1",
        ],
        capture_output=True,
        check=True,
    )
    assert json.loads(shown.stdout)["Architecture"] == "arm64"
    assert digest.startswith("sha256:")
    assert registry.requests("GET", "/v2/support/images/manifests/") > 0


@pytest.mark.real
def test_registry_keeps_its_address_and_content_over_a_restart(
    registry: Registry, tmp_path: Path
) -> None:
    layout = write_layout(tmp_path / "oci", {"v1": Image([Layer([file("a", b"1")])])})
    push(layout, "v1", registry.address, "support/restart")
    registry.stop()
    registry.start()
    command = ["skopeo", "inspect", "--raw", "--tls-verify=false"]
    shown = subprocess.run(
        [*command, f"docker://{registry.address}/support/restart:v1"],
        capture_output=True,
        check=True,
    )
    assert json.loads(shown.stdout)["schemaVersion"] == 2
