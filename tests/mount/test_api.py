"""The Python surface over real sandboxes on views of the host's tree, with a fake daemon."""

import gc
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from snapshotter import api
from snapshotter.errors import (
    CommandFailedError,
    CommandTimeoutError,
    InvalidInputError,
    NotFoundError,
    SandboxError,
    SnapshotterError,
    UnavailableError,
)
from snapshotter.service import control
from tests.support.api_daemon import daemon, upper
from tests.support.fake_daemon import FakeDaemon, make_image, make_record
from tests.support.mounts import mounts_below

pytestmark = pytest.mark.mount

__all__ = ["daemon", "upper"]

HELD = ["sh", "-c", "trap '' TERM INT; (setsid sleep 1000 &); echo up; sleep 1000"]


@pytest.fixture
def client(daemon: FakeDaemon, tmp_path: Path) -> Iterator[api.Client]:
    with api.connect(root=tmp_path) as connected:
        yield connected


@pytest.fixture
def box(client: api.Client) -> Iterator[api.Sandbox]:
    with client.sandbox("i", hostname="box", env={"OWN": "sandbox"}) as opened:
        yield opened


def test_a_command_has_input_output_environment_user_and_directory(box: api.Sandbox) -> None:
    script = 'cat; echo "$FROM $OWN $MORE"; id -u; pwd; hostname; echo err >&2; exit 3'
    done = box.run(
        ["sh", "-c", script], input="in\n", env={"MORE": "x"}, user="65534", cwd="/new", text=True
    )
    assert done.stdout.splitlines() == ["in", "image sandbox x", "65534", "/new", "box"]
    assert (done.stderr, done.exit_status, done.arguments[0]) == ("err\n", 3, "sh")
    assert box.run(["head", "-c1", "/dev/zero"]).stdout == b"\0"
    assert box.run(["sh", "-c", "echo e >&2"], stderr="stdout", text=True).stdout == "e\n"
    assert box.run().exit_status == 0  # the image's own command


def test_commands_share_what_they_write(box: api.Sandbox, upper: Path) -> None:
    box.run(["sh", "-c", "echo kept > /made"], check=True)
    assert box.read_file("/made") == b"kept\n"
    assert (upper / "1/upper/made").read_text() == "kept\n"
    box.write_file("/given/file", b"data", mode=0o755)
    assert box.run(["cat", "/given/file"]).stdout == b"data"
    assert not Path("/made").exists()


def test_the_daemon_is_told_of_the_whole_life(
    client: api.Client, daemon: FakeDaemon, tmp_path: Path
) -> None:
    image = make_image()
    with client.sandbox(image, upper=tmp_path / "kept", view="kernel") as box:
        assert (box.record.id, box.image.number) == (make_record().id, 1)
        asked = daemon.asked(control.Mount)[0]
        assert isinstance(asked, control.Mount)
        assert (asked.image, asked.view) == (image.handle, "kernel")
        assert asked.upper == str(tmp_path / "kept")
        owner = asked.owner_pid
        assert daemon.requests[-1] == control.Placed(id=box.record.id, target="/", pid=owner or 0)
    assert daemon.requests[-1] == control.Unmounted(id=box.record.id)
    box.close()  # again


def test_trees_are_copied_in_and_out(box: api.Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "d").mkdir(parents=True)
    (source / "d/tool").write_text("#!/bin/sh\necho works > ${0%/*}/result\n")
    (source / "d/tool").chmod(0o755)
    box.copy_in(source, "/opt/deep/copy")
    box.run(["/opt/deep/copy/d/tool"], check=True)
    box.copy_out("/opt/deep/copy", tmp_path / "back")
    assert (tmp_path / "back/d/result").read_text() == "works\n"
    box.run(["ln", "-s", "/", "/opt/way"], check=True)
    with pytest.raises(NotFoundError):
        box.copy_out(f"/opt/way/{tmp_path}/none", tmp_path / "x")
    with pytest.raises(NotFoundError):
        box.copy_out("/opt/../../../../proc/self/root", tmp_path / "x")


def test_other_file_systems_below_are_left_out(client: api.Client, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/in").write_text("of the host")
    with client.sandbox("i", volumes=[f"{tmp_path}/data:/opt/new/data"]) as box:
        box.write_file("/opt/new/file", b"of the sandbox")
        box.copy_out("/opt/new", tmp_path / "out")
        assert sorted(os.listdir(tmp_path / "out")) == ["data", "file"]
        assert os.listdir(tmp_path / "out/data") == []
        box.copy_out("/opt/new/data", tmp_path / "out/data")
        assert (tmp_path / "out/data/in").read_text() == "of the host"


def test_failures_are_typed(box: api.Sandbox) -> None:
    with pytest.raises(SandboxError, match="not found") as missing:
        box.run(["nothing-here"])
    assert missing.value.status == 127
    with pytest.raises(CommandFailedError, match="exit status 7: why") as failed:
        box.run(["sh", "-c", "echo why >&2; exit 7"], check=True)
    assert failed.value.exit_status == 7
    with pytest.raises(CommandTimeoutError) as late:
        box.run(HELD, timeout=0.5)
    assert late.value.stdout in (b"up\n", b"")
    with pytest.raises(SandboxError, match="nobody-here"):
        box.run(["true"], user="nobody-here")
    assert box.run(["kill", "-9", "0"]).exit_status in (137, 1)
    assert box.run(["echo", "still here"], text=True).stdout == "still here\n"


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ("echo x", {}),
        (["a\0b"], {}),
        (["true"], {"env": {"": "x"}}),
        (["true"], {"cwd": "relative"}),
        (["true"], {"input": b"x", "stdin": "null"}),
        (["true"], {"stdin": "pipe"}),
        (["true"], {"stdout": "nowhere"}),
    ],
)
def test_bad_input_is_refused(box: api.Sandbox, arguments: list[str], options: object) -> None:
    with pytest.raises(InvalidInputError):
        box.run(arguments, **options)  # type: ignore[arg-type,call-overload]


def test_output_can_be_streamed_and_input_fed(box: api.Sandbox) -> None:
    with box.start(["cat"], stdin="pipe") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in (b"one\n", b"two\n"):
            process.stdin.write(line)
            assert process.stdout.readline() == line
        process.stdin.close()
        assert (process.stdout.read(), process.wait(60)) == (b"", 0)


def test_a_process_can_be_signalled_waited_for_and_killed(box: api.Sandbox) -> None:
    script = "trap 'echo got; exit 5' USR1; echo up; while :; do sleep 0.01; done"
    with box.start(["sh", "-c", script]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        with pytest.raises(CommandTimeoutError, match="goes on"):
            process.wait(0)
        process.send_signal(signal.SIGUSR1)
        assert (process.stdout.read(), process.wait()) == (b"got\n", 5)
    with box.start(HELD) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        assert Path(f"/proc/{process.pid}").exists()
        process.kill()
        assert (process.stdout.read(), process.wait()) == (b"", 137)
    with pytest.raises(SandboxError, match="nobody"):
        box.start(["true"], user="nobody-here")


def test_leaving_a_sandbox_kills_what_runs_in_it(client: api.Client) -> None:
    with client.sandbox("i") as box:
        process = box.start(HELD)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
    assert process.stdout.read() == b""
    process.close()
    for use in (lambda: box.run(["true"]), lambda: box.read_file("/etc/passwd")):
        with pytest.raises((UnavailableError, SandboxError), match="closed"):
            use()


def test_closing_the_client_closes_all_that_is_open(client: api.Client, daemon: FakeDaemon) -> None:
    boxes = [client.sandbox("i"), client.sandbox("i")]
    tree = client.mount("i")
    client.close()
    for box in boxes:
        with pytest.raises(SnapshotterError, match="closed"):
            box.run(["true"])
    assert not os.path.exists(tree)
    assert len(daemon.asked(control.Unmounted)) == 3
    with client.sandbox("i") as another:  # it can be used again
        assert another.run(["true"]).exit_status == 0


def test_threads_use_one_client_and_one_sandbox_at_once(client: api.Client) -> None:
    def use(number: int) -> bytes:
        with client.sandbox("i") as box, ThreadPoolExecutor(4) as threads:
            runs = [threads.submit(box.run, ["echo", f"{number}.{i}"]) for i in range(4)]
            return b"".join(run.result().stdout for run in runs)

    with ThreadPoolExecutor(5) as threads:
        said = list(threads.map(use, range(5)))
    assert said == [b"".join(b"%d.%d\n" % (n, i) for i in range(4)) for n in range(5)]


def test_a_sandbox_that_cannot_be_made_leaves_nothing(
    client: api.Client, daemon: FakeDaemon, upper: Path, tmp_path: Path
) -> None:
    with pytest.raises(SandboxError, match="volume"):
        client.sandbox("i", volumes=[f"{tmp_path}:/etc/passwd/below"])
    assert daemon.requests[-1] == control.Unmounted(id=make_record().id)
    daemon.answers[control.Placed] = control.Failed(code="not_found", message="no such mount")
    with pytest.raises(NotFoundError, match="no such mount"):
        client.sandbox("i")
    assert mounts_below(upper)[1:] == []
    mounts = len(daemon.asked(control.Mount))
    for options in ({"user": "a b"}, {"volumes": ["/none:/x"]}, {"view": "vr"}):
        with pytest.raises((InvalidInputError, NotFoundError)):
            client.sandbox("i", **options)  # type: ignore[arg-type]
    assert len(daemon.asked(control.Mount)) == mounts


def test_the_host_of_sandboxes_is_started_anew(client: api.Client, daemon: FakeDaemon) -> None:
    with client.sandbox("i") as box:
        asked = daemon.asked(control.Mount)[0]
        assert isinstance(asked, control.Mount)
        status = Path(f"/proc/{asked.owner_pid}/stat").read_text()
        host = int(status.rpartition(")")[2].split()[1])
        descriptor = os.pidfd_open(host)
        os.kill(host, signal.SIGKILL)
        assert select.select([descriptor], [], [], 60)[0]
        os.close(descriptor)
        with client.sandbox("i") as another:
            assert another.run(["echo", "new"], text=True).stdout == "new\n"
        assert box.run(["echo", "old"], text=True).stdout == "old\n"


def test_a_mount_stands_for_a_block(client: api.Client, daemon: FakeDaemon, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    with client.mount("i") as tree:
        assert os.path.ismount(tree)
        assert Path(tree, "etc/passwd").read_bytes() == Path("/etc/passwd").read_bytes()
        assert daemon.requests[-1] == control.Placed(
            id=tree.record.id, target=tree.path, pid=os.getpid()
        )
    assert not os.path.exists(tree)
    with client.mount("i", own, nosuid=True) as tree:
        assert tree.path == str(own)
        assert os.statvfs(own).f_flag & os.ST_NOSUID
    assert not os.path.ismount(own)
    assert daemon.requests[-1] == control.Unmounted(id=tree.record.id)


def test_errors_of_the_daemon_are_raised(client: api.Client, daemon: FakeDaemon) -> None:
    daemon.answers[control.Pull] = control.Failed(code="not_found", message="no such tag")
    with pytest.raises(NotFoundError, match="no such tag"):
        client.pull("x")
    daemon.answers[control.ListImages] = control.Images(images=[make_image()])
    daemon.answers[control.ListMounts] = control.Mounts(mounts=[make_record()])
    assert client.images() == [make_image()]
    assert client.mounts() == [make_record()]


def test_a_synchronous_program_loads_no_event_loop() -> None:
    code = "import sys, snapshotter.api; print({'anyio', 'asyncio', 'trio'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_nothing_of_a_program_with_threads_is_left_open(
    client: api.Client, daemon: FakeDaemon
) -> None:
    def use() -> None:
        with client.sandbox("i") as box:
            box.run(["true"])

    def open_descriptors() -> int:
        daemon.await_clients_gone()  # its ends are of this process, too
        return len(os.listdir("/proc/self/fd"))

    use()
    gc.collect()  # what earlier tests left
    before = open_descriptors()
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    use()
    assert open_descriptors() == before
