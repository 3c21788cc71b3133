"""The command as its users run it: in processes of its own."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

import snapshotter
from tests.support.archives import pack_layout, save
from tests.support.cache_v1 import Client
from tests.support.images import Image, Layer, directory, file, push, write_layout
from tests.support.registry import Registry

IMAGE = Image([Layer([directory("d"), *(file(f"d/{n}", b"%d" % n) for n in range(20))])])
REPOSITORY = Path(__file__).parents[3]


def command(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cache_server", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )


@contextmanager
def serving(directory: Path, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A server process on ``directory``/root and cache.sock, listening."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "cache_server", "serve", "--root", str(directory / "root")),
            *("--socket", str(directory / "cache.sock"), *map(str, arguments)),
        ],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    try:
        assert process.stderr is not None
        first = process.stderr.readline()
        assert json.loads(first)["event"] == "serving", first
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def layout(tmp_path: Path) -> str:
    return f"oci:{write_layout(tmp_path / 'oci', {'v1': IMAGE})}:v1"


def test_import_prints_what_is_ready_and_images_lists_it(tmp_path: Path, layout: str) -> None:
    root = tmp_path / "root"
    imported = command("import", "oci:oci:v1", "--root", root, cwd=tmp_path)
    assert imported.returncode == 0, imported.stderr
    assert imported.stdout.splitlines()[1] == IMAGE.digest
    assert imported.stderr == ""
    again = json.loads(command("import", layout, "--root", root, "--json").stdout)
    assert again["digest"] == IMAGE.digest
    assert again["totals"]["files"] == 20
    listed = command("images", "--root", root)
    assert listed.stdout.splitlines()[1].split()[0] == layout
    (stored,) = json.loads(command("images", "--root", root, "--json").stdout)
    assert stored["references"] == [layout]


def test_archives_are_imported_by_relative_path_and_platform(tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "oci", {"v1": IMAGE})
    pack_layout(layout, tmp_path / "oci.tar")
    save(tmp_path / "saved.tar", {"demo:1": IMAGE})
    options = ("--root", tmp_path / "root", "--platform", "linux/amd64")
    imported = command("import", "oci-archive:oci.tar:v1", *options, cwd=tmp_path)
    assert imported.returncode == 0, imported.stderr
    assert imported.stdout.splitlines()[1] == IMAGE.digest
    imported = command(
        "import", "docker-archive:saved.tar:demo:1", "--json", *options, cwd=tmp_path
    )
    assert imported.returncode == 0, imported.stderr
    assert json.loads(imported.stdout)["totals"]["files"] == 20
    refused = command("import", "oci:oci", "--platform", "windows/amd64", cwd=tmp_path)
    assert (refused.returncode, "linux alone" in refused.stderr) == (8, True)


def test_images_of_an_empty_root_are_none_and_nothing_is_made(tmp_path: Path) -> None:
    listed = command("images", "--root", tmp_path / "root", "--json")
    assert (listed.returncode, json.loads(listed.stdout)) == (0, [])
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    ("image", "exit_code", "said"),
    [
        ("docker-daemon:debian", 2, "docker://HOST"),
        ("oci:/nowhere:v1", 3, "/nowhere"),
        ("127.0.0.1:9/none", 5, "127.0.0.1"),
    ],
)
def test_exit_codes_and_one_line_of_error(
    tmp_path: Path, image: str, exit_code: int, said: str
) -> None:
    failed = command("import", image, "--root", tmp_path / "root")
    assert failed.returncode == exit_code
    assert said in failed.stderr
    assert failed.stderr.count("\n") == 1


def test_import_asks_the_server_that_runs_on_the_root(tmp_path: Path, layout: str) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    with serving(tmp_path, "--token-file", token):
        options = ("--root", tmp_path / "root")
        assert command("import", layout, *options).returncode == 4
        imported = command("import", layout, *options, "--token-file", token)
        assert imported.returncode == 0, imported.stderr
        assert IMAGE.digest in imported.stdout
        assert layout in command("images", *options).stdout
        second = command("serve", *options, "--socket", tmp_path / "other.sock")
        assert second.returncode == 6
        assert str(tmp_path / "cache.sock") in second.stderr


def test_sigterm_ends_cleanly_with_clients_connected(tmp_path: Path) -> None:
    with serving(tmp_path) as process, Client(tmp_path / "cache.sock") as client:
        assert client.ask({"op": "ping"})["status"] == "ready"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert client.is_closed()
    assert not (tmp_path / "cache.sock").exists()


def test_killed_server_comes_back_with_everything(tmp_path: Path, layout: str) -> None:
    request = {"op": "prepare", "image": layout, "architecture": "amd64"}
    with serving(tmp_path) as process:
        with Client(tmp_path / "cache.sock") as client:
            before = client.ask(request)
        process.kill()
        process.wait(20)
    with socket.socket(socket.AF_UNIX) as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(str(tmp_path / "cache.sock"))
    with serving(tmp_path), Client(tmp_path / "cache.sock") as client:
        handle = before["image_handle"]
        assert client.ask({"op": "open", "handle": handle, "architecture": "amd64"}) == before
        ((fields, body),) = client.fetch([before["metadata_image"]["content"]])
        assert fields["chunk"] == before["metadata_image"]["content"]
        assert len(body) == before["metadata_image"]["size"]


@pytest.mark.real
def test_known_image_needs_no_registry_but_refresh_does(registry: Registry, tmp_path: Path) -> None:
    push(write_layout(tmp_path / "oci", {"v1": IMAGE}), "v1", registry.address, "server/cli")
    reference = f"docker://{registry.address}/server/cli:v1"
    options = ("--root", tmp_path / "root")
    assert command("import", reference, *options).returncode == 0
    blobs = registry.requests("GET", "/v2/server/cli/blobs/")
    assert blobs == 2
    assert command("import", reference, *options, "--refresh").returncode == 0
    assert registry.requests("GET", "/v2/server/cli/blobs/") == 3, "the config alone comes again"
    registry.stop()
    try:
        assert command("import", reference, *options).returncode == 0
        refused = command("import", reference, *options, "--refresh")
        assert refused.returncode == 5
        assert registry.address in refused.stderr
    finally:
        registry.start()


def test_limits_hold_for_import_and_for_a_server(tmp_path: Path, layout: str) -> None:
    limit = ("--limit", "layer_entries=5")
    refused = command("import", layout, "--root", tmp_path / "other", *limit)
    assert (refused.returncode, "5, " in refused.stderr) == (2, True), refused.stderr
    assert "at entry" in refused.stderr
    with serving(tmp_path, *limit):
        by_server = command("import", layout, "--root", tmp_path / "root")
        for option in (("--limit", "layer_entries=9"), ("--insecure-registry", "a.io")):
            ignored = command("import", layout, "--root", tmp_path / "root", *option)
            assert (ignored.returncode, "a server runs" in ignored.stderr) == (2, True)
    assert (by_server.returncode, "at entry" in by_server.stderr) == (2, True), by_server.stderr
    unknown = command("import", layout, "--root", tmp_path / "other", "--limit", "size=1")
    assert (unknown.returncode, "layer_bytes" in unknown.stderr) == (2, True)


@pytest.mark.parametrize("with_server", [False, True])
def test_gc_removes_what_removed_images_needed(tmp_path: Path, with_server: bool) -> None:
    root = tmp_path / "root"
    shared = Layer([file("shared", b"s" * 5000)])
    tagged = {
        "one": Image([shared, Layer([file("one", os.urandom(100_000))])]),
        "two": Image([shared]),
    }
    layout = write_layout(tmp_path / "oci", tagged)
    for tag in tagged:
        assert command("import", f"oci:{layout}:{tag}", "--root", root).returncode == 0
    with serving(tmp_path) if with_server else nullcontext():
        missing = command("images", "rm", f"oci:{layout}:three", "--root", root)
        assert (missing.returncode, "there is none" in missing.stderr) == (3, True)
        looked = command("images", "rm", "oci:oci:one", "--dry-run", "--root", root, cwd=tmp_path)
        assert looked.stdout == f"image would be removed: oci:{layout}:one\n"
        removed = command("images", "rm", tagged["one"].digest, "--root", root, "--json")
        assert json.loads(removed.stdout)["names"] == [f"oci:{layout}:one"]
        planned = json.loads(command("gc", "--dry-run", "--root", root, "--json").stdout)
        assert planned["freed_bytes"] > 100_000
        done = command("gc", "--root", root)
        assert done.stdout.startswith("1 layers and 2 chunks removed, "), done.stderr
        assert "removed, 0 packs dropped and 0 rewritten" in command("gc", "--root", root).stdout
        (image,) = json.loads(command("images", "--root", root, "--json").stdout)
        assert image["references"] == [f"oci:{layout}:two"]


def test_the_version_is_told() -> None:
    assert command("--version").stdout == f"cache-server {snapshotter.__version__}\n"


@pytest.mark.parametrize(("words", "offered"), [("im", "import"), ("serve --lim", "--limit")])
def test_the_shell_can_complete_commands_and_options(words: str, offered: str) -> None:
    """As the function that --show-completion prints asks for it."""
    line = f"cache-server {words}"
    code = "import sys; sys.argv = ['cache-server']; from cache_server.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "_CACHE_SERVER_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(line.split(" ")) - 1),
            "PYTHONPATH": str(Path(__file__).parents[3]),
        },
        capture_output=True,
        text=True,
    )
    assert offered in done.stdout.split(), done.stderr
