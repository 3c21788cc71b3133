"""Sandboxes that stay open: real processes and namespaces, over a view of the host's tree."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotter.errors import SandboxError, UnavailableError
from snapshotter.kernel_view import syscalls
from snapshotter.paths import Paths
from snapshotter.service.sandbox_link import RunReports, SandboxHost, SandboxLink
from snapshotter.service.sandbox_spec import Plan, Surroundings, Volume
from tests.support.fake_daemon import view_of_host
from tests.support.mounts import mounts_below

pytestmark = pytest.mark.mount


@pytest.fixture
def upper(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "upper"
    directory.mkdir()
    syscalls.mount("tmpfs", directory, "tmpfs")
    try:
        yield directory
    finally:
        syscalls.umount(directory, syscalls.MNT_DETACH)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[SandboxHost]:
    started = SandboxHost(Paths(tmp_path, tmp_path / "run"))
    try:
        yield started
    finally:
        started.close()


def enter(link: SandboxLink, upper: Path, *volumes: Volume) -> int:
    surroundings = Surroundings(hostname="box", volumes=volumes, read_only=False)
    view = view_of_host(upper)()
    try:
        return link.enter(view, surroundings, staging=upper)
    finally:
        os.close(view)


@pytest.fixture
def link(host: SandboxHost, upper: Path) -> Iterator[SandboxLink]:
    with host.open() as opened:
        os.close(enter(opened, upper))
        yield opened


def script_plan(script: str, *, user: str = "0", workdir: str = "/") -> Plan:
    path = {"PATH": "/usr/bin:/bin"}
    return Plan(arguments=["sh", "-c", script], environment=path, user=user, workdir=workdir)


def start(link: SandboxLink, script: str, **where: str) -> tuple[RunReports, int]:
    """A run of a script, and the end of a pipe to read its output from."""
    readable, writable = os.pipe()
    null = os.open(os.devnull, os.O_RDONLY)
    try:
        return link.run(script_plan(script, **where), (null, writable, writable)), readable
    finally:
        os.close(writable)
        os.close(null)


def read_all(descriptor: int) -> bytes:
    with open(descriptor, "rb") as file:
        return file.read()


def await_end(reports: RunReports) -> int:
    while reports.status is None:
        assert reports.wait(60)
    reports.close()
    return reports.status


def run(link: SandboxLink, script: str, **where: str) -> tuple[int, str]:
    reports, output = start(link, script, **where)
    said = read_all(output).decode()
    status = await_end(reports)
    if reports.failure is not None:
        raise reports.failure
    return status, said


def await_process_end(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([descriptor], [], [], 60)[0]
    os.close(descriptor)


def test_commands_share_the_root_and_have_processes_of_their_own(
    link: SandboxLink, upper: Path
) -> None:
    first = "echo $$; hostname; echo kept > /made; echo shared > /dev/shm/x; (sleep 1000 &)"
    assert run(link, first) == (0, "2\nbox\n")  # the sleeper held the pipe, and is gone
    second = "cat /made /dev/shm/x; ls -d /proc/[0-9]* | wc -l; exit 7"
    status, said = run(link, second)
    assert (status, said.split()[:2]) == (7, ["kept", "shared"])
    assert int(said.split()[2]) <= 5  # of the first process, sh, ls and wc alone
    assert (upper / "upper/made").read_text() == "kept\n"
    assert not Path("/made").exists()


def test_several_commands_run_at_once(link: SandboxLink) -> None:
    fifo = "test -p /fifo || mkfifo /fifo 2>/dev/null;"
    reading, output = start(link, f"{fifo} cat /fifo")
    assert run(link, f"{fifo} until test -p /fifo; do :; done; echo through > /fifo")[0] == 0
    assert (read_all(output), await_end(reading)) == (b"through\n", 0)


def test_the_sandbox_guards_what_a_plain_run_guards(link: SandboxLink) -> None:
    script = (
        "echo 1 > /proc/sys/kernel/sysrq || echo a; mknod /n b 7 0 || echo b;"
        "mount -t tmpfs t /mnt || echo c; head -c1 /proc/kcore; ls /proc/self/fd | wc -l;"
        "mkdir /sys/fs/cgroup/x || echo d; grep ^SigBlk /proc/self/status | cut -f2"
    )
    _, said = run(link, f"exec 2>/dev/null; {script}")
    assert said.split() == ["a", "b", "c", "4", "d", "0" * 16]


def test_volumes_user_and_directory(host: SandboxHost, upper: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/in").write_text("given\n")
    with host.open() as link:
        os.close(enter(link, upper, Volume(str(tmp_path / "data"), "/data", read_only=True)))
        script = "id -u; pwd; cat /data/in; touch /data/x 2>/dev/null || echo refused"
        said = run(link, script, user="65534", workdir="/new")[1]
    assert said.split() == ["65534", "/new", "given", "refused"]


@pytest.mark.parametrize(
    ("where", "said"),
    [({"user": "nobody-here"}, "nobody-here"), ({"workdir": "/dev/null"}, "null")],
)
def test_what_cannot_be_run_is_told(link: SandboxLink, where: dict[str, str], said: str) -> None:
    with pytest.raises(SandboxError, match=said) as caught:
        run(link, "true", **where)
    assert caught.value.status == 125
    assert run(link, "echo still here")[1] == "still here\n"


def test_a_command_that_is_not_there(link: SandboxLink) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    plan = Plan(arguments=["nothing\udcff"], environment={}, user="0", workdir="/")
    reports = link.run(plan, (null, null, null))
    os.close(null)
    assert await_end(reports) == 127
    assert reports.failure is not None
    assert (reports.failure.status, "not found" in str(reports.failure)) == (127, True)


def test_arguments_may_be_longer_than_a_message(link: SandboxLink) -> None:
    long = "x" * 100_000
    assert run(link, f"echo {long} {long[:20000]} | wc -c")[1] == "120002\n"


HELD = "trap '' TERM INT HUP; (setsid sh -c 'trap \"\" TERM; sleep 1000' &); echo up; sleep 1000"


def test_killing_a_run_ends_all_it_started(link: SandboxLink) -> None:
    reports, output = start(link, HELD)
    assert os.read(output, 3) == b"up\n"
    reports.send_signal(signal.SIGTERM)  # ignored
    reports.kill()
    reports.kill()
    assert read_all(output) == b""
    assert await_end(reports) == 128 + signal.SIGKILL
    assert reports.failure is None


def test_a_run_whose_asker_forgets_it_is_killed(link: SandboxLink) -> None:
    reports, output = start(link, HELD)
    assert os.read(output, 3) == b"up\n"
    reports.close()
    assert read_all(output) == b""


def test_a_signal_reaches_the_command_alone(link: SandboxLink) -> None:
    reports, output = start(link, "trap 'echo got; exit 5' TERM; echo up; sleep 1000 & wait")
    assert os.read(output, 3) == b"up\n"
    reports.read()
    assert reports.is_decided
    reports.send_signal(signal.SIGTERM)
    assert (read_all(output), await_end(reports)) == (b"got\n", 5)
    reports.send_signal(signal.SIGTERM)  # nobody is hit


def test_releasing_frees_the_view_at_once(host: SandboxHost, upper: Path) -> None:
    with host.open() as link:
        os.close(enter(link, upper))
        reports, output = start(link, HELD)
        assert os.read(output, 3) == b"up\n"
        link.release()
        assert read_all(output) == b""
        assert await_end(reports) == 128 + signal.SIGKILL
        options = [("lowerdir", "/"), ("upperdir", f"{upper}/upper"), ("workdir", f"{upper}/work")]
        os.close(syscalls.make_mount("overlay", [*options, ("index", "on")]))  # EBUSY if in use
        with pytest.raises(SandboxError, match="closed"):
            run(link, "true")


def test_a_closed_sandbox_ends_and_another_lives_on(host: SandboxHost, upper: Path) -> None:
    with host.open() as first, host.open() as second:
        os.close(enter(second, upper))
        first.close()
        await_process_end(first.pid)
        assert run(second, "echo here")[1] == "here\n"


def test_sandboxes_outlive_their_host(host: SandboxHost, link: SandboxLink) -> None:
    host.close()
    assert run(link, "echo here")[1] == "here\n"
    with pytest.raises(UnavailableError, match=r"sandboxes\.log"):
        host.open()


def test_a_killed_sandbox_is_told(link: SandboxLink) -> None:
    reports, output = start(link, HELD)
    assert os.read(output, 3) == b"up\n"
    os.kill(link.pid, signal.SIGKILL)
    assert read_all(output) == b""
    assert await_end(reports) == 128 + signal.SIGKILL
    assert "closed or killed" in str(reports.failure)
    with pytest.raises(UnavailableError, match="closed"):
        run(link, "true")


def test_a_root_that_cannot_be_made_is_told(host: SandboxHost, upper: Path, tmp_path: Path) -> None:
    with host.open() as link, pytest.raises(SandboxError, match=r"volume /.*/upper"):
        enter(link, upper, Volume(str(upper), "/etc/passwd/below"))


ASKER = """
import os, socket, sys, time
from pathlib import Path
from snapshotter.paths import Paths
from snapshotter.service.sandbox_link import SandboxHost
from tests.mount import test_sandbox_link as t
upper = Path(sys.argv[1])
host = SandboxHost(Paths(upper, upper / "run"))
link = host.open()
os.close(t.enter(link, upper))
if os.fork() == 0:  # holds every socket of its parent
    os.execv("/bin/sleep", ["sleep", "1000"]) if sys.argv[2] == "exec" else time.sleep(1000)
reports, output = t.start(link, t.HELD)
assert os.read(output, 3) == b"up\\n"
print(link.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("fork", ["exec", "copy"])
def test_sigkill_of_the_asker_ends_everything(upper: Path, fork: str) -> None:
    asker = subprocess.Popen(
        [sys.executable, "-c", ASKER, upper, fork],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    )
    assert asker.stdout is not None
    try:
        sandbox = int(asker.stdout.readline())
        asker.kill()
        await_process_end(sandbox)
        assert mounts_below(upper)[1:] == []
    finally:
        os.killpg(asker.pid, signal.SIGKILL)  # the fork
        asker.wait()
        asker.stdout.close()
