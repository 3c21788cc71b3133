from __future__ import annotations

import os
import socket

import pytest

from snapshotter.vm.streams import Input, Lines, Output

MARK = b"[end 0123]"


def copied(*blocks: bytes) -> bytes:
    ours, theirs = socket.socketpair()
    read, write = os.pipe()
    with ours, theirs, os.fdopen(read, "rb") as output:
        copier = Output(ours, write, MARK)
        copier.start()
        for block in blocks:
            theirs.sendall(block)
        if MARK not in b"".join(blocks):
            theirs.close()
        copier.join()
        os.close(write)
        return output.read()


@pytest.mark.parametrize(
    "blocks",
    [
        (b"text" + MARK,),
        (b"te", b"xt[e", b"nd 01", b"23]"),
        (b"text[end ", b"0123] and what is left behind"),
        (b"text",),
        (b"text", MARK),
    ],
)
def test_output_ends_with_its_mark_wherever_it_is_cut(blocks: tuple[bytes, ...]) -> None:
    assert copied(*blocks) == b"text"


def test_what_only_begins_like_the_mark_is_output() -> None:
    assert copied(b"a[end", b" 0[end 0123", b"x", MARK) == b"a[end 0[end 0123x"
    assert copied(b"cut [end 01") == b"cut [end 01"


def test_output_is_taken_on_when_nobody_reads_it_any_more() -> None:
    ours, theirs = socket.socketpair()
    read, write = os.pipe()
    os.close(read)
    with ours, theirs:
        copier = Output(ours, write, MARK)
        copier.start()
        for _ in range(100):
            theirs.sendall(bytes(65536))
        theirs.sendall(MARK)
        copier.join()
    os.close(write)
    assert not copier.is_alive()


def test_input_passes_its_end_on() -> None:
    ours, theirs = socket.socketpair()
    read, write = os.pipe()
    with ours, theirs:
        copier = Input(read, ours)
        copier.start()
        os.write(write, b"some input")
        os.close(write)
        assert theirs.recv(100, socket.MSG_WAITALL) == b"some input"
        copier.join()
    os.close(read)


def test_lines_come_whole() -> None:
    ours, theirs = socket.socketpair()
    heard: list[str] = []
    with ours:
        reader = Lines(ours, heard.append)
        reader.start()
        with theirs:
            for part in (b"rea", b"dy\nexit", b" 3\nhalf"):
                theirs.sendall(part)
        reader.join()
    assert heard == ["ready", "exit 3"]
