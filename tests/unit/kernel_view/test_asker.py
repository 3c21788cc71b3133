import platform
import subprocess
import sys

import pytest

from snapshotter.kernel_view import asker

CHMOD = {"x86_64": 268, "aarch64": 53}[platform.machine()]
OPENAT = {"x86_64": 257, "aarch64": 56}[platform.machine()]


def answer_with(monkeypatch: pytest.MonkeyPatch, *texts: bytes) -> None:
    remaining = list(texts)
    monkeypatch.setattr(asker, "_read", lambda _path: remaining.pop(0))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"%d 0xffffff9c 0x7f 0x0 0x0 0x0 0x0 0x7ffe 0x7f\n" % CHMOD, True),
        (b"466 0x3 0x7f 0x0 0x0 0x0 0x0 0x7ffe 0x7f\n", True),
        (b"%d 0xffffff9c 0x7f 0x0 0x0 0x0 0x0 0x7ffe 0x7f\n" % OPENAT, False),
        (b"-1 0x7ffe 0x7f\n", False),
        (b"", False),
        (b"nonsense", False),
    ],
)
def test_the_system_call_tells(
    monkeypatch: pytest.MonkeyPatch, text: bytes, expected: bool
) -> None:
    answer_with(monkeypatch, text)
    assert asker.is_metadata_only(5) is expected


def test_an_asker_that_is_still_falling_asleep_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer_with(monkeypatch, b"running\n", b"running\n", b"%d 0x0\n" % CHMOD)
    assert asker.is_metadata_only(5)


def test_one_that_keeps_running_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, *[b"running\n"] * 5)
    assert not asker.is_metadata_only(5)


def test_a_process_that_waits_in_read() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "import os; os.write(1, b'x'); os.read(0, 1)"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        process.stdout.read(1)
        assert not asker.is_metadata_only(process.pid)
        assert not asker.is_being_killed(process.pid)


@pytest.mark.parametrize(
    ("pending", "shared", "expected"),
    [
        (0, 0, False),
        (0x100, 0, True),
        (0, 0x100, True),
        (0x102, 0, True),
        (0x4000, 0x200, False),
    ],
)
def test_only_sigkill_counts(
    monkeypatch: pytest.MonkeyPatch, pending: int, shared: int, expected: bool
) -> None:
    text = (
        f"Name:\tcat\nSigQ:\t1/2\nSigPnd:\t{pending:016x}\nShdPnd:\t{shared:016x}\nSigBlk:\t0100\n"
    )
    answer_with(monkeypatch, text.encode())
    assert asker.is_being_killed(5) is expected


def test_nothing_is_said_of_an_asker_that_cannot_be_named() -> None:
    assert not asker.is_metadata_only(0)
    assert not asker.is_being_killed(0)
    assert not asker.is_being_killed(2**22 + 1)
