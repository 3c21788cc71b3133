import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from snapshotter.errors import UnavailableError
from snapshotter.service.frame_stream import peer_pid
from snapshotter.service.processes import (
    Program,
    Supervisor,
    end_process,
    exit_status,
    log_tail,
    spawn,
    wait_for_end,
)

MODULE = "tests.support.listening_process"


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    """A program that listens; whatever process of it is left is ended."""
    path = tmp_path / "socket"
    program = Program("listener", (MODULE, str(path)), tmp_path / "log", lambda: peer_pid(path))
    yield program
    if (pid := peer_pid(path)) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


async def until(condition: Callable[[], bool]) -> None:
    """Polls other processes; bounded."""
    with trio.fail_after(20):
        while not condition():  # noqa: ASYNC110 - the event is in another process
            await trio.sleep(0.01)


def test_missing_program_is_started_and_started_again_when_it_dies(program: Program) -> None:
    async def main() -> None:
        supervisor = Supervisor(program)
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(supervisor.run)
                await supervisor.wait_until_tried()
                first = supervisor.pid
                await supervisor.wait_until_up()
                assert first is not None
                assert os.getsid(first) == first  # a session of its own
                os.kill(first, signal.SIGKILL)
                await wait_for_end(first)
                await until(lambda: supervisor.pid not in (first, None))
                assert supervisor.pid == program.find()
                nursery.cancel_scope.cancel()
            assert program.find() is not None  # it goes on without its supervisor

    trio.run(main)


def test_living_program_is_adopted(program: Program) -> None:
    child = spawn(program)

    async def main() -> None:
        await until(lambda: program.find() is not None)
        supervisor = Supervisor(program)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(supervisor.run)
            await supervisor.wait_until_up()
            assert supervisor.pid == child
            nursery.cancel_scope.cancel()
        await end_process(child)
        assert exit_status(child) == -signal.SIGTERM

    trio.run(main)


def test_program_that_cannot_start_is_told_with_its_own_words(tmp_path: Path) -> None:
    program = Program("broken", (MODULE, "--fail"), tmp_path / "log", lambda: None)
    (tmp_path / "log").write_text("of an earlier day\n")

    async def main() -> None:
        supervisor = Supervisor(program)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(supervisor.run)
            with trio.fail_after(20):
                await supervisor.wait_until_tried()
            assert "ended" in supervisor.trouble
            with pytest.raises(UnavailableError, match=r"broken is not up: .*it cannot work") as e:
                await supervisor.wait_until_up(deadline_s=0.01)
            assert "earlier day" not in str(e.value)
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_process_that_ignores_sigterm_is_killed() -> None:
    code = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True);"
        "signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        trio.run(end_process, child.pid, 0.05)
        assert child.wait() == -signal.SIGKILL
    trio.run(end_process, child.pid)  # one that has ended is no error


def test_tail_of_a_log_is_bounded(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"{number}\n" for number in range(10_000)))
    assert log_tail(log) == "9995 | 9996 | 9997 | 9998 | 9999"
    assert log_tail(log, log.stat().st_size) == "(its log is empty)"
