"""Registries that are not plain and public, through the CLI, the daemon and its cache server."""

import base64
import json
import os
from pathlib import Path

import pytest

from tests.support.archives import pack_layout, save
from tests.support.http_faults import Reply, Seen, scripted
from tests.support.images import MANIFEST, Image, Layer, file, write_layout
from tests.support.product import NewProduct
from tests.support.secured_registry import PASSWORD, USER, SecuredRegistry, pushed

pytestmark = [pytest.mark.mount, pytest.mark.real]


def test_private_image_needs_the_authfile_and_names_it(
    tmp_path: Path, new_product: NewProduct
) -> None:
    image = Image([Layer([file("secret", os.urandom(1000))])])
    layout = write_layout(tmp_path / "oci", {"v1": image})
    authfile = tmp_path / "auth.json"
    product = new_product()
    product.environment["HOME"] = str(tmp_path)
    with pushed(SecuredRegistry(tmp_path / "registry"), layout, "--dest-tls-verify=false") as text:
        refused = product.cli("pull", text)
        assert refused.returncode == 4, refused.stderr
        assert f"{tmp_path}/.docker/config.json" in refused.stderr
        missing = product.cli("pull", text, "--authfile", authfile)
        assert (missing.returncode, str(authfile) in missing.stderr) == (3, True)
        auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        host = text.removeprefix("docker://").partition("/")[0]
        authfile.write_text(json.dumps({"auths": {host: {"auth": auth}}}))
        pulled = product.ask("pull", text, "--authfile", authfile)
    assert pulled["prepared"]["digest"] == image.digest


def test_insecure_registry_of_the_settings_through_the_proxy_of_the_environment(
    new_product: NewProduct, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Layer([file("a", b"hello")])
    image = Image([layer])
    blobs = {layer.descriptor["digest"]: layer.blob}

    def proxy(request: Seen) -> Reply:
        assert request.path.startswith("http://registry.invalid:5000/v2/demo/")
        if "/manifests/" in request.path:
            return Reply(body=image.manifest, headers={"Content-Type": MANIFEST})
        return Reply(body=blobs.get(request.path.rpartition("/")[2], image.config))

    with scripted(proxy) as server:
        monkeypatch.setenv("HTTP_PROXY", f"http://{server.address}")
        product = new_product({"insecure_registries": ["registry.invalid:5000"]})
        pulled = product.ask("pull", "registry.invalid:5000/demo:v1")
    assert pulled["prepared"]["digest"] == image.digest


def test_archives_are_pulled_and_mounted(tmp_path: Path, new_product: NewProduct) -> None:
    image = Image([Layer([file("a", b"from a tar")])])
    product = new_product()
    pack_layout(write_layout(tmp_path / "oci", {"v1": image}), product.base / "oci.tar")
    save(product.base / "saved.tar", {"demo:1": image})
    for number, reference in enumerate(
        ("oci-archive:oci.tar:v1", "docker-archive:saved.tar", "docker-archive:saved.tar:demo:1")
    ):
        view = product.mount(reference, f"view{number}", "--read-only")
        assert (view / "a").read_bytes() == b"from a tar"
        product.do("umount", view)


def test_limits_of_the_settings_bind_the_daemons_own_cache_server(
    tmp_path: Path, new_product: NewProduct
) -> None:
    image = Image([Layer([file("a", b"1"), file("b", b"2")])])
    layout = write_layout(tmp_path / "oci", {"v1": image})
    refused = new_product({"limits": ["layer_entries=1"]}).cli("pull", f"oci:{layout}:v1")
    assert (refused.returncode, "layer_entries" in refused.stderr) == (2, True), refused.stderr
    unknown = new_product({"limits": ["layers=1"]}).cli("pull", f"oci:{layout}:v1")
    assert (unknown.returncode, "layer_entries" in unknown.stderr) == (5, True), unknown.stderr


def test_images_with_large_configs_are_pulled_listed_and_mounted(
    tmp_path: Path, new_product: NewProduct
) -> None:
    image = Image([Layer([file("a", b"x")])], labels={"long": "x" * 900_000})
    other = Image([Layer([file("a", b"y")])], labels={"long": "y" * 900_000})
    layout = write_layout(tmp_path / "oci", {"v1": image, "v2": other})
    product = new_product()
    for tag in ("v1", "v2"):
        product.ask("pull", f"oci:{layout}:{tag}")
    listed = product.ask("images")
    assert [each["prepared"]["digest"] for each in listed] == [image.digest, other.digest]
    assert (product.mount(f"oci:{layout}:v2", "v2") / "a").read_bytes() == b"y"
