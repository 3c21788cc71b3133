"""`snapshotter run` from outside: a real sandbox on a view of the host's tree, a fake daemon."""

import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapshotter.kernel_view import syscalls
from snapshotter.service import control
from tests.support.fake_daemon import FakeDaemon, make_image, make_record, view_of_host

pytestmark = pytest.mark.mount

READY_THEN_WAIT = "trap 'echo got; exit 5' INT TERM; echo ready; sleep 1000 & wait"
CLI = (sys.executable, "-m", "snapshotter.cli.main")

Run = Callable[..., "subprocess.CompletedProcess[str]"]


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
def daemon(tmp_path: Path, upper: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    monkeypatch.setenv("SNAPSHOTTER_ROOT", str(tmp_path))
    with FakeDaemon(tmp_path / "run/control.sock") as running:
        running.view = view_of_host(upper)
        running.answers[control.Mount] = control.Mounted(
            mount=make_record(), image=make_image(env={"FROM": "image"}), reason="it works"
        )
        yield running


@pytest.fixture
def run(daemon: FakeDaemon) -> Run:
    def call(*words: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
        return subprocess.run([*CLI, "run", *words], input=stdin, capture_output=True, text=True)

    return call


@pytest.fixture
def begin(daemon: FakeDaemon) -> Iterator[Callable[[str], "subprocess.Popen[bytes]"]]:
    """Starts a sandbox that runs a shell script; returns once the script said it is ready."""
    started: list[subprocess.Popen[bytes]] = []

    def call(script: str) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            [*CLI, "run", "i", "--", "sh", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process

    yield call
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_the_command_has_its_own_world(run: Run, daemon: FakeDaemon, upper: Path) -> None:
    script = "hostname; echo $$; echo $FROM $HOSTNAME $HOME; cat /proc/1/comm; echo x > /made; pwd"
    done = run("i", "--hostname", "box", "sh", "-c", script)
    assert done.stderr == ""
    assert done.stdout.splitlines()[:3] == ["box", "2", "image box /root"]
    assert done.stdout.splitlines()[4] == "/"
    assert (upper / "upper/made").read_text() == "x\n"
    assert not Path("/made").exists()
    mount_id = make_record().id
    placed = daemon.asked(control.Placed)
    assert [(p.id, p.target) for p in placed if isinstance(p, control.Placed)] == [(mount_id, "/")]
    assert daemon.requests[-1] == control.Unmounted(id=mount_id)


def test_only_what_a_sandbox_needs_reaches_the_upper(run: Run, upper: Path) -> None:
    assert run("i", "true").returncode == 0
    assert list((upper / "upper").rglob("*")) == []


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("true",), 0, ""),
        (("sh", "-c", "exit 7"), 7, ""),
        (("sh", "-c", "kill -TERM $$"), 143, ""),
        (("sh", "-c", "kill -TERM 0"), 143, ""),
        (("/etc/passwd",), 126, "cannot be executed: Permission denied"),
        (("no-such-program",), 127, "not found in the image"),
        (("/no/such/program",), 127, "not found in the image"),
    ],
)
def test_exit_statuses(run: Run, words: tuple[str, ...], status: int, said: str) -> None:
    done = run("i", "--", *words)
    assert (done.returncode, said in done.stderr) == (status, True)


def test_a_missing_interpreter_is_named(run: Run, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/interpreter\n")
    script.chmod(0o755)
    done = run("-v", f"{script}:/script", "i", "/script")
    assert (done.returncode, "interpreter" in done.stderr) == (127, True)


def test_an_unknown_user_is_our_failure(run: Run, daemon: FakeDaemon) -> None:
    done = run("-u", "no-such-user", "i", "true")
    assert (done.returncode, "no-such-user" in done.stderr) == (125, True)
    assert isinstance(daemon.requests[-1], control.Unmounted)


def test_user_directory_environment_and_stdin(run: Run) -> None:
    done = run(
        *("-u", "65534:7", "-w", "/new/dir", "-e", "A=b c", "i"),
        *(
            "sh",
            "-c",
            'id -u; id -G; pwd; echo "$A"; cat; grep -E "CapEff|NoNew" /proc/self/status',
        ),
        stdin="typed\n",
    )
    expected = ["65534", "7", "/new/dir", "b c", "typed", "CapEff:\t0000000000000000"]
    assert done.stdout.splitlines() == [*expected, "NoNewPrivs:\t1"]


def test_volumes(run: Run, tmp_path: Path, upper: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/in").write_text("given\n")
    done = run(
        *("-v", f"{tmp_path}/data:/deep/rw", "-v", f"{tmp_path}/data:/ro:ro"),
        *("-v", f"{tmp_path}/data/in:/one/file", "i"),
        *("sh", "-c", "cat /one/file; echo back > /deep/rw/out; echo no > /ro/x || echo refused"),
    )
    assert done.stdout == "given\nrefused\n"
    assert (tmp_path / "data/out").read_text() == "back\n"
    assert sorted(p.name for p in (upper / "upper").iterdir()) == ["deep", "one", "ro"]


def test_root_of_a_sandbox_cannot_reach_the_host(run: Run) -> None:
    script = (
        "echo 1 > /proc/sys/kernel/sysrq || echo a; mknod /n b 7 0 || echo b;"
        "mount -t tmpfs t /mnt || echo c; cat /proc/kcore | head -c1; ls /proc/self/fd | wc -l;"
        "ls /sys/fs/cgroup >/dev/null && mkdir /sys/fs/cgroup/x || echo d"
    )
    with Path("/etc/passwd").open() as leaked:
        os.set_inheritable(leaked.fileno(), True)
        done = subprocess.run(
            [*CLI, "run", "i", "--", "sh", "-c", script],
            capture_output=True,
            text=True,
            pass_fds=(leaked.fileno(),),
            stdin=subprocess.DEVNULL,
        )
    assert done.stdout.split() == ["a", "b", "c", "4", "d"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_command(
    begin: Callable[[str], "subprocess.Popen[bytes]"], number: int
) -> None:
    process = begin(READY_THEN_WAIT)
    process.send_signal(number)
    assert process.communicate()[0] == b"got\n"
    assert process.returncode == 5


def test_orphans_are_reaped_and_end_with_the_command(
    begin: Callable[[str], "subprocess.Popen[bytes]"],
) -> None:
    # The orphan's end is seen in /proc only if the first process collects it.
    script = (
        "trap 'exit 0' TERM; (sh -c 'echo $$ > /orphan' &); until [ -s /orphan ]; do :; done;"
        "while [ -e /proc/$(cat /orphan) ]; do :; done; (sleep 1000 &);"
        "echo ready; sleep 1000 & wait"
    )
    process = begin(script)
    process.terminate()
    assert process.communicate()[0] == b""  # both sleepers held stdout
    assert process.returncode == 0


def test_sigkill_of_the_command_line_ends_the_sandbox(
    begin: Callable[[str], "subprocess.Popen[bytes]"],
) -> None:
    process = begin("echo ready; sleep 1000")
    process.kill()
    assert process.communicate()[0] == b""  # EOF: nobody of the sandbox holds stdout any more
    assert process.returncode == -signal.SIGKILL


class Typist:
    """A command line on a terminal of its own; what it shows is read, keys are typed."""

    def __init__(self, *words: str) -> None:
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.execv(CLI[0], [*CLI, *words])
        self.shown = b""

    def await_text(self, text: bytes) -> None:
        while text not in self.shown:
            assert select.select([self.terminal], [], [], 60)[0], self.shown
            self.shown += os.read(self.terminal, 4096)

    def type(self, keys: bytes) -> None:
        os.write(self.terminal, keys)

    def end(self) -> int:
        """The exit status, after the rest of what is shown was read."""
        try:
            while data := os.read(self.terminal, 4096):
                self.shown += data
        except OSError:
            pass  # EIO: the last one on the terminal is gone
        _, status = os.waitpid(self.pid, 0)
        os.close(self.terminal)
        return os.waitstatus_to_exitcode(status)


def test_ctrl_c_reaches_the_command_once(daemon: FakeDaemon) -> None:
    script = "n=0; trap 'n=$((n+1)); echo got $n' INT; echo ready; until read x; do :; done; exit 5"
    typist = Typist("run", "i", "--", "sh", "-c", script)
    typist.await_text(b"ready")
    typist.type(b"\x03")
    typist.await_text(b"got 1")
    typist.type(b"end\n")
    assert typist.end() == 5
    assert b"got 2" not in typist.shown


def test_a_command_in_a_pipeline_gets_the_keyboard_when_it_asks(
    daemon: FakeDaemon, tmp_path: Path
) -> None:
    quoted = " ".join([*CLI, "run i -- sh -c 'read x; echo read $x' | cat"])
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv("/bin/sh", ["sh", "-c", quoted])
    typist = Typist.__new__(Typist)
    typist.pid, typist.terminal, typist.shown = pid, terminal, b""
    typist.type(b"words\n")
    typist.await_text(b"read words")
    assert typist.end() == 0


def test_a_shell_has_its_terminal(daemon: FakeDaemon) -> None:
    typist = Typist("run", "-e", "PS1=prompt:", "i", "--", "sh", "-i")
    typist.await_text(b"prompt:")
    typist.type(b"tty; sed -u s/^/got-/\n")
    typist.await_text(b"/dev/console")
    typist.type(b"line\n")
    typist.await_text(b"got-line")
    typist.shown = b""
    typist.type(b"\x03")
    typist.await_text(b"prompt:")
    typist.type(b"exit 3\n")
    assert typist.end() == 3
    assert b"job control turned off" not in typist.shown
