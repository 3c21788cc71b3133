"""The scripts of a guest, run by the same busybox in a change of root on this host."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from snapshotter.vm import initramfs
from snapshotter.vm.initramfs import GuestCommand, GuestSettings, run_archive
from snapshotter.vm.kernel_modules import Module
from tests.support.debian_image import required_tool

SCRIPTS = Path(initramfs.__file__).parent


@pytest.fixture
def busybox() -> str:
    return required_tool("busybox", "busybox-static")


@pytest.fixture
def root(tmp_path: Path, busybox: str) -> Path:
    """A root with the shell and nothing else, as an image may be."""
    for name in ("bin", "etc", "proc", "no-x", "work dir"):
        (tmp_path / name).mkdir()
    (tmp_path / "bin/sh").write_bytes(Path(busybox).read_bytes())
    (tmp_path / "bin/sh").chmod(0o755)
    (tmp_path / "no-x/sh").write_text("#!/bin/sh\n")
    (tmp_path / "etc/passwd").write_text(
        "root:x:0:0::/root:/bin/sh\nann:x:7:8::/home/ann:/bin/sh\n"
    )
    (tmp_path / "etc/group").write_text("root:x:0:\nann:x:8:\nstaff:x:50:root,ann\n")
    tmp_path.chmod(0o755)
    return tmp_path


def unpack(archive: bytes, directory: Path, busybox: str) -> None:
    directory.mkdir()
    subprocess.run([busybox, "cpio", "-i"], input=archive, cwd=directory, check=True)


def run(
    root: Path, busybox: str, *, programs: list[str], arguments: list[str], **more: object
) -> subprocess.CompletedProcess[str]:
    values: dict[str, object] = {"environment": {}, "user": "0", "workdir": "/", **more}
    command = GuestCommand(name="sh", programs=programs, arguments=arguments, **values)  # type: ignore[arg-type]
    settings = GuestSettings(view="plain", options="rw", hostname="h", end_mark="m")
    made = root.parent / f"{root.name}.made"
    unpack(run_archive(settings, command), made, busybox)
    text = (SCRIPTS / "guest_inside.sh").read_text() + (made / "command").read_text()
    script = 'mount -t proc proc "$1/proc" && exec "$2" chroot "$1" sh -c "$3"'
    words = ["unshare", "-m", "sh", "-c", script, "sh", str(root), busybox, text]
    return subprocess.run(words, capture_output=True, text=True, check=False)


SHOW = 'pwd; id -u; id -g; id -G; echo $HOME; echo "$ODD"; printf \'<%s>\' "$@"; exit 9'


def test_the_command_has_what_was_asked_for(root: Path, busybox: str) -> None:
    done = run(
        root,
        busybox,
        programs=["/usr/bin/sh", "/no-x/sh", "/bin/sh"],
        arguments=["-c", SHOW, "sh", "two words", "it's", "$HOME", ""],
        environment={"ODD": "a 'b' \"c\"\n$d", "PATH": "/bin"},
        workdir="/work dir",
    )
    assert done.stderr == ""
    assert done.stdout == (
        "/work dir\n0\n0\n0 50\n/root\na 'b' \"c\"\n$d\n<two words><it's><$HOME><>"
    )
    assert done.returncode == 9


@pytest.mark.parametrize(
    ("user", "ids"),
    [
        ("ann", "7\n8\n8 50\n/home/ann"),
        ("7", "7\n8\n8 50\n/home/ann"),
        ("ann:staff", "7\n50\n50\n/home/ann"),
        ("ann:123", "7\n123\n123\n/home/ann"),
        ("4321", "4321\n0\n0\n/"),
        ("4321:4322", "4321\n4322\n4322\n/"),
    ],
)
def test_users_are_those_of_the_image(root: Path, busybox: str, user: str, ids: str) -> None:
    done = run(root, busybox, programs=["/bin/sh"], arguments=["-c", SHOW], user=user)
    assert (done.stderr, done.stdout) == ("", f"/\n{ids}\n\n<>")


def test_home_that_was_given_is_the_home(root: Path, busybox: str) -> None:
    done = run(
        root, busybox, programs=["/bin/sh"], arguments=["-c", "echo $HOME"],
        environment={"HOME": "/elsewhere"},
    )  # fmt: skip
    assert done.stdout == "/elsewhere\n"


def test_a_workdir_is_made(root: Path, busybox: str) -> None:
    done = run(root, busybox, programs=["/bin/sh"], arguments=["-c", "pwd"], workdir="/new/one")
    assert done.stdout == "/new/one\n"
    assert (root / "new/one").is_dir()


@pytest.mark.parametrize(
    ("changed", "status", "text"),
    [
        ({"programs": ["/usr/bin/sh", "/sh"]}, 127, "sh is not in the image"),
        ({"programs": ["/no-x/sh"]}, 126, "cannot be executed"),
        ({"user": "nobody-here"}, 125, "user nobody-here is not in the image"),
        ({"user": "ann:nothing"}, 125, "group nothing is not in the image"),
        ({"workdir": "/bin/sh"}, 125, "workdir /bin/sh cannot be entered"),
    ],
)
def test_what_cannot_be_run_is_said(
    root: Path, busybox: str, changed: dict[str, object], status: int, text: str
) -> None:
    done = run(root, busybox, **({"programs": ["/bin/sh"], "arguments": []} | changed))  # type: ignore[arg-type]
    assert done.returncode == status
    assert text in done.stderr


def test_settings_reach_the_shell_as_they_are(tmp_path: Path, busybox: str) -> None:
    settings = GuestSettings(
        view="plain",
        options="rw",
        hostname="it's",
        end_mark="[end]",
        terminal="rows 3 cols 4",
    )
    command = GuestCommand(
        name="x", programs=[], arguments=[], environment={}, user="0", workdir="/"
    )
    unpack(run_archive(settings, command), tmp_path / "made", busybox)
    script = '. ./settings; echo "$view|$hostname|$terminal"'
    done = subprocess.run(
        [busybox, "sh", "-c", script],
        cwd=tmp_path / "made",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "plain|it's|rows 3 cols 4\n"


def test_the_base_has_busybox_the_modules_in_order_and_scripts_that_parse(
    tmp_path: Path, busybox: str
) -> None:
    modules = [Module("zeta", b"1"), Module("alpha", b"2")]
    archive = initramfs.base_archive(Path(busybox).read_bytes(), modules)
    unpack(archive, tmp_path / "made", busybox)
    made = tmp_path / "made"
    assert sorted(path.name for path in (made / "modules").iterdir()) == [
        "00-zeta.ko",
        "01-alpha.ko",
    ]
    for script in ("init", "inside"):
        subprocess.run([made / "bin/busybox", "sh", "-n", made / script], check=True)
