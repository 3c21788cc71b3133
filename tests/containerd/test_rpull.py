"""rpull against a real containerd and a real registry."""

from __future__ import annotations

import base64
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cache_server.images import unmerged
from cache_server.sources.manifest import resolved
from snapshotter.containerd.client import ContainerdClient
from snapshotter.containerd.image_documents import image_documents
from snapshotter.containerd.rpull import Outcome, rpull
from tests.support.box_image import GREETING, Pushed, box_image
from tests.support.containerd import SNAPSHOTTER
from tests.support.images import INDEX, push, write_layout
from tests.support.node import Node
from tests.support.product import await_true
from tests.support.registry import Registry
from tests.support.secured_registry import PASSWORD, USER, SecuredRegistry, pushed

pytestmark = [pytest.mark.mount, pytest.mark.real]


def test_answer_tells_what_was_made(node: Node, box: Pushed) -> None:
    answer = node.rpull(box.reference)
    assert answer == {
        "name": box.reference,
        "digest": box.image.digest,
        "manifest": box.image.digest,
        "architecture": "amd64",
        "chain_id": answer["chain_id"],
        "layers": 3,
        "namespace": node.containerd.namespace,
        "snapshotter": "snapshotter",
        "created": True,
        "healed": 0,
    }
    assert node.containerd.snapshots()[answer["chain_id"]][1] == "Committed"
    assert node.containerd.names("leases", "ls") == []
    assert node.rpull(box.reference) == {**answer, "created": False}


def test_image_of_many_platforms_keeps_its_index(
    node: Node, registry: Registry, tmp_path: Path
) -> None:
    mine, other = box_image(seed=8), box_image(seed=9)
    other.architecture = "riscv64"
    digest = push(
        write_layout(tmp_path / "oci", {"v1": [other, mine]}), "v1", registry.address, "platforms"
    )
    reference = f"{registry.address}/platforms:v1"
    answer = node.rpull(reference)
    assert (answer["digest"], answer["manifest"]) == (digest, mine.digest)
    line = next(x for x in node.containerd.do("images", "ls").splitlines() if reference in x)
    assert INDEX in line
    assert digest in line
    assert node.containerd.run(reference, "cat", "/etc/greeting") == GREETING.decode()
    foreign = ("--platform", "linux/riscv64")
    assert node.rpull(reference, *foreign)["manifest"] == other.digest
    printed = node.containerd.run(reference, "cat", "/etc/greeting", options=foreign)
    assert printed == GREETING.decode()
    by_digest = f"{registry.address}/platforms@{mine.digest}"
    assert node.rpull(by_digest)["digest"] == mine.digest
    assert node.containerd.run(by_digest, "cat", "/etc/greeting") == GREETING.decode()


def test_private_image_is_pulled_with_the_authfile(node: Node, tmp_path: Path) -> None:
    image = box_image(seed=10)
    layout = write_layout(tmp_path / "oci", {"v1": image})
    with pushed(SecuredRegistry(tmp_path / "registry"), layout, "--dest-tls-verify=false") as text:
        assert node.product.cli("rpull", text, *node.where).returncode == 4
        name = text.removeprefix("docker://")
        auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        authfile = tmp_path / "auth.json"
        authfile.write_text(json.dumps({"auths": {name.partition("/")[0]: {"auth": auth}}}))
        node.rpull(text, "--authfile", str(authfile))
    # the registry is gone now: what was prepared needs it no more
    assert not node.rpull(text, "--no-refresh")["created"]
    assert node.containerd.run(name, "cat", "/etc/greeting") == GREETING.decode()


def test_snapshotter_that_is_not_lazy_is_told_and_nothing_is_left(node: Node, box: Pushed) -> None:
    done = node.product.cli("rpull", box.reference, *node.where, "--snapshotter", "overlayfs")
    assert done.returncode == 8
    assert "ctr images pull --snapshotter overlayfs" in done.stderr
    assert box.reference not in node.containerd.names("images", "ls")
    assert node.containerd.names("leases", "ls") == []
    snapshots = node.containerd.do("snapshots", "--snapshotter", "overlayfs", "ls")
    assert len(snapshots.splitlines()) == 1


def test_containerd_that_is_not_there_is_told(node: Node, box: Pushed) -> None:
    done = node.product.cli("rpull", box.reference, "--address", "/nowhere/at/all.sock")
    assert done.returncode == 5
    assert "containerd at /nowhere/at/all.sock" in done.stderr


def test_snapshotter_that_containerd_does_not_know_is_told(node: Node, box: Pushed) -> None:
    done = node.product.cli("rpull", box.reference, *node.where, "--snapshotter", "unheard-of")
    assert done.returncode == 2
    assert "snapshotter containerd config" in done.stderr


def test_service_that_does_not_run_is_told_and_is_found_once_it_does(
    node: Node, box: Pushed
) -> None:
    node.stop_service()
    try:
        done = node.product.cli("rpull", box.reference, *node.where)
        assert done.returncode == 5
        assert "is `snapshotter containerd serve` running?" in done.stderr
        assert node.containerd.names("leases", "ls") == []
    finally:
        node.start_service()
    await_true(
        lambda: node.product.cli("rpull", box.reference, *node.where).returncode == 0,
        "the service's return",
        log=node.containerd.log,
    )
    assert node.containerd.run(box.reference, "cat", "/etc/greeting") == GREETING.decode()


def test_many_at_once_make_one_image(node: Node, box: Pushed) -> None:
    node.product.do("pull", f"docker://{box.reference}")
    image = image_documents(
        box.reference,
        unmerged(resolved(box.image.manifest, box.image.config, "amd64", "box"), "amd64"),
        [box.image.manifest.decode()],
    )

    def pull() -> Outcome:
        with ContainerdClient(node.containerd.address, node.containerd.namespace) as client:
            return rpull(client, SNAPSHOTTER, image)

    with ThreadPoolExecutor(8) as pool:
        outcomes = [future.result() for future in [pool.submit(pull) for _ in range(16)]]
    assert sorted(outcome.created for outcome in outcomes) == [False] * 15 + [True]
    assert {outcome.healed for outcome in outcomes} == {0}
    assert node.containerd.names("leases", "ls") == []
    assert node.containerd.run(box.reference, "cat", "/etc/greeting") == GREETING.decode()


def test_local_image_is_refused_before_anything_is_done(node: Node) -> None:
    done = node.product.cli("rpull", "oci:/somewhere:v1", *node.where)
    assert (done.returncode, "push it" in done.stderr) == (2, True)
