"""Mutates known inputs and gives them to a parser: the same inputs for the same seed, everywhere.

A target takes bytes and may raise the errors that it is allowed to. Anything else, more CPU time
than ``MAX_CPU_S`` for one input or more memory than ``MAX_MEMORY_BYTES`` is a failure, whose
message says how to run that input alone.
"""

from __future__ import annotations

import hashlib
import os
import random
import resource
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from snapshotter.errors import CorruptError, InvalidInputError

CORPUS = Path(__file__).resolve().parents[1] / "fuzz" / "corpus"
MAX_CPU_S = 10.0
MAX_MEMORY_BYTES = 1 << 30
LONG = os.environ.get("SNAPSHOTTER_LONG") == "1"
"""Set by whoever has minutes rather than seconds: a hundred times as many inputs."""

_INTERESTING = (0, 1, 2, 0x7F, 0x80, 0xFF)
_WORDS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF)
Target = Callable[[bytes], object]
Repair = Callable[[bytearray], None]


class TooSlowError(Exception):
    """One input took more CPU time than any may."""


def corpus(name: str) -> list[bytes]:
    """The kept inputs of a target, in the order of their names."""
    inputs = [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
    assert inputs, f"no inputs in {CORPUS / name}"
    return inputs


def fuzz(
    target: Target,
    inputs: list[bytes],
    *,
    count: int,
    repair: Repair = lambda data: None,
    allowed: tuple[type[Exception], ...] = (InvalidInputError, CorruptError),
) -> None:
    """Gives ``target`` every input as it is, every short cut of it, and ``count`` mutations.

    ``repair`` makes checksums and lengths right again, so that damage reaches what is behind them;
    it is left out for every fourth mutation.
    """
    with _limits():
        for data in inputs:
            _run(target, data, allowed)
            for length in range(0, len(data), max(1, len(data) // 100)):
                _run(target, data[:length], allowed)
        source = random.Random(20_240_229)
        for number in range(count * (100 if LONG else 1)):
            mutated = _mutate(source, inputs)
            if number % 4:
                repair(mutated)
            _run(target, bytes(mutated), allowed)


def _run(target: Target, data: bytes, allowed: tuple[type[Exception], ...]) -> None:
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
    try:
        target(data)
    except allowed:
        pass
    except BaseException as error:
        kept = Path(tempfile.gettempdir()) / f"fuzz-{hashlib.sha256(data).hexdigest()[:16]}"
        kept.write_bytes(data)
        raise AssertionError(f"{error!r} for the {len(data)} bytes kept in {kept}") from error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _mutate(source: random.Random, inputs: list[bytes]) -> bytearray:
    data = bytearray(source.choice(inputs))
    for _ in range(1 << source.randrange(4)):
        if not data:
            break
        at = source.randrange(len(data))
        length = min(source.choice((1, 2, 4, 8, 16, 64, 512)), len(data) - at)
        _MUTATIONS[source.randrange(len(_MUTATIONS))](source, data, at, length, inputs)
    return data


def _flip(source: random.Random, data: bytearray, at: int, _: int, __: list[bytes]) -> None:
    data[at] ^= 1 << source.randrange(8)


def _set(source: random.Random, data: bytearray, at: int, _: int, __: list[bytes]) -> None:
    data[at] = source.choice((*_INTERESTING, source.randrange(256)))


def _digit(source: random.Random, data: bytearray, at: int, _: int, __: list[bytes]) -> None:
    data[at] = source.choice(b'0123456789 -+.,={}[]"\\/\n\0')


def _word(source: random.Random, data: bytearray, at: int, _: int, __: list[bytes]) -> None:
    width = source.choice((2, 4, 8))
    word = source.choice(_WORDS) & (1 << 8 * width) - 1
    order = source.choice(("little", "big"))
    data[at : at + width] = word.to_bytes(width, "little" if order == "little" else "big")


def _cut(_: random.Random, data: bytearray, at: int, length: int, __: list[bytes]) -> None:
    del data[at : at + length]


def _repeat(source: random.Random, data: bytearray, at: int, length: int, _: list[bytes]) -> None:
    data[at:at] = bytes(data[at : at + length]) * source.choice((1, 1, 1, 20))


def _splice(
    source: random.Random, data: bytearray, at: int, length: int, inputs: list[bytes]
) -> None:
    other = source.choice(inputs)
    begin = source.randrange(len(other) + 1)
    data[at : at + length] = other[begin : begin + length]


_MUTATIONS = (_flip, _set, _digit, _word, _cut, _repeat, _splice)


@contextmanager
def _limits() -> Iterator[None]:
    """CPU time of one input and memory of all, for the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    previous = signal.signal(signal.SIGPROF, _too_slow)
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_MEMORY_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGPROF, previous)


def _too_slow(*_: object) -> None:
    raise TooSlowError(f"more than {MAX_CPU_S} s of CPU time")
