"""The flows of the CLI, as a user types them, with everything real behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.debian_image import LocalImage
from tests.support.images import push
from tests.support.mounts import mounts_below
from tests.support.product import NewProduct, Product, await_true
from tests.support.registry import Registry

pytestmark = [pytest.mark.mount, pytest.mark.real]
REPOSITORY = Path(__file__).resolve().parents[2]


def test_pull_mount_list_unmount_stop(
    five: LocalImage, registry: Registry, new_product: NewProduct
) -> None:
    product = new_product()
    push(five.layout, five.tag, registry.address, "flows/five")
    reference = f"docker://{registry.address}/flows/five:five"
    pulled = product.ask("pull", reference)
    assert reference in pulled["references"]
    assert len(product.ask("images")) == 1
    assert len(product.ask("inspect", reference)["prepared"]["layers"]) == 5

    view = product.mount(reference, "view")
    assert (view / "keep/added").read_bytes() == b"added last"
    (mount,) = product.ask("ps")
    assert (mount["target"], mount["view"]) == (str(view), "kernel")
    product.do("umount", view)
    assert product.ask("ps") == []
    product.do("daemon", "stop")
    assert_all_gone(product)


def assert_all_gone(product: Product) -> None:
    await_true(lambda: product.processes() == [], "all processes end", log=product.logs)
    assert mounts_below(product.base) == []


def test_upper_of_the_user_keeps_changes(five: LocalImage, new_product: NewProduct) -> None:
    product = new_product()
    upper = product.base / "changes"
    first = product.mount(five.reference, "first", "--upper", upper)
    (first / "keep/added").write_text("mine")
    (first / "keep/small").unlink()
    busy = product.cli("mount", five.reference, product.base / "first", "--upper", upper)
    assert busy.returncode == 6, busy.stderr
    product.do("umount", first)
    second = product.mount(five.reference, "second", "--upper", upper)
    assert (second / "keep/added").read_text() == "mine"
    assert not (second / "keep/small").exists()


def test_private_upper_goes_with_the_mount(five: LocalImage, new_product: NewProduct) -> None:
    product = new_product()
    view = product.mount(five.reference, "view")
    (view / "new").write_bytes(b"x" * 10_000)
    product.do("umount", view)
    await_true(
        lambda: not any((product.root / "mounts").iterdir()), "the upper goes", log=product.logs
    )
    again = product.mount(five.reference, "again")
    assert not (again / "new").exists()


def test_busy_mount_is_not_unmounted(five: LocalImage, new_product: NewProduct) -> None:
    product = new_product()
    view = product.mount(five.reference, "view")
    with (view / "keep/added").open():
        refused = product.cli("umount", view)
        assert refused.returncode == 6, refused.stderr
        assert str(os.getpid()) in refused.stderr
    product.do("umount", view)


@pytest.mark.parametrize(
    ("image", "exit_code"),
    [
        ("oci:/nowhere/at/all:tag", 3),
        ("ftp://example/what", 2),
        ("docker://127.0.0.1:1/name:tag", 5),
    ],
)
def test_what_cannot_be_pulled_is_refused_with_its_reason(
    new_product: NewProduct, image: str, exit_code: int
) -> None:
    product = new_product()
    target = product.base / "target"
    target.mkdir()
    refused = product.cli("mount", image, target)
    assert refused.returncode == exit_code, refused.stderr
    assert "Traceback" not in refused.stderr
    assert [m for m in mounts_below(product.base) if m.target == str(target)] == []


def test_run_passes_status_and_streams(debian: LocalImage, new_product: NewProduct) -> None:
    product = new_product()
    shown = product.cli("run", debian.reference, "--", "sh", "-c", "cat; exit 7", input_text="in")
    assert (shown.returncode, shown.stdout) == (7, "in"), shown.stderr
    assert product.cli("run", debian.reference, "--", "/nonexistent").returncode == 127
    assert product.cli("run", debian.reference, "--", "/etc/passwd").returncode == 126
    assert product.ask("ps") == []


def test_killed_run_leaves_nothing(debian: LocalImage, new_product: NewProduct) -> None:
    product = new_product()
    product.do("pull", debian.reference)
    command = product.command("run", debian.reference, "--", "sh", "-c", "echo up; sleep 1000")
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, env=product.environment, cwd=product.base
    )
    with running:
        assert running.stdout is not None
        try:
            assert running.stdout.readline() == b"up\n"
            assert len(product.ask("ps")) == 1
        finally:
            running.send_signal(signal.SIGKILL)
        assert running.stdout.read() == b""  # EOF: the sandbox's processes have ended
    await_true(lambda: product.ask("ps") == [], "the mount goes", log=product.logs)


def test_quickstart_prints_one_line_and_leaves_nothing_mounted() -> None:
    done = subprocess.run(
        [sys.executable, REPOSITORY / "examples/quickstart.py"],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert "cold" in done.stdout
    assert "warm" in done.stdout
    assert mounts_below(REPOSITORY / ".quickstart") == []
