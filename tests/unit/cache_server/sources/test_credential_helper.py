import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cache_server.sources.credential_helper import ask_helper
from snapshotter.errors import AccessDeniedError, UnavailableError

Install = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a shell script on the PATH as helper ``test``."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def write(script: str) -> None:
        program = tmp_path / "docker-credential-test"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    return write


def ask(**options: float) -> tuple[str, str] | None:
    return asyncio.run(ask_helper("test", "q.io", named_in="/c.json", **options))


def test_answer_without_secret_is_none(install: Install) -> None:
    install("echo '{}'")
    assert ask() is None


def test_answer_that_is_no_json_is_refused_without_showing_it(install: Install) -> None:
    install("echo swordfish")
    with pytest.raises(
        AccessDeniedError, match=r"docker-credential-test \(named in /c\.json\)"
    ) as e:
        ask()
    assert "swordfish" not in str(e.value)


def test_what_it_says_on_stderr_is_told_if_it_said_nothing_else(install: Install) -> None:
    install("echo no dbus >&2; exit 3")
    with pytest.raises(AccessDeniedError, match=r"failed \(3\): no dbus"):
        ask()


def test_helper_that_hangs_is_killed_with_its_children(install: Install, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    # a child that holds the helper's output, and the fifo, open
    install(f"sleep 1000 > {tmp_path}/fifo & sleep 1000")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(UnavailableError, match=r"no answer within 0\.5 s"):
            ask(timeout_s=0.5)
        os.set_blocking(reader, True)
        assert os.read(reader, 1) == b""  # the end: nobody has it open for writing
    finally:
        os.close(reader)
