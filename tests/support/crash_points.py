"""Crashes at every step: runs an action in child processes that end, each before another change.

The changes are calls of the functions of ``os`` that change files. A write may also end half done.
"""

import functools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_CHANGES = (
    "chmod", "fdatasync", "fsync", "ftruncate", "link", "mkdir", "pwrite", "rename", "replace",
    "rmdir", "symlink", "truncate", "unlink", "write",
)  # fmt: skip
_CRASHED = 77
_MOST = 500


def crashes(base: Path, place: Path, action: Callable[[Path], None]) -> Iterator[str]:
    """Copies ``base`` to ``place`` and crashes ``action(place)`` there, once for each change.

    Gives the name of each crash point (``3 rename``) with ``place`` as the crash left it, and ends
    when the action comes to its end. RuntimeError if it fails.
    """
    for number in range(1, _MOST):
        name = _crash(base, place, action, number, is_half=False)
        if name is None:
            return
        yield name
        if name.endswith("write"):
            half = _crash(base, place, action, number, is_half=True)
            assert half is not None
            yield half
    raise RuntimeError(f"more than {_MOST} changes")


def _crash(
    base: Path, place: Path, action: Callable[[Path], None], number: int, *, is_half: bool
) -> str | None:
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(base, place, symlinks=True)
    return _run(place, action, number, is_half=is_half)


def _run(place: Path, action: Callable[[Path], None], number: int, *, is_half: bool) -> str | None:
    """The name of the change before which the child crashed; None if there was none."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _be_child(place, action, number, writer, is_half=is_half)
    os.close(writer)
    with open(reader) as told:
        name = told.read()
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, _CRASHED):
        raise RuntimeError(f"the action failed in its child ({code}): {name}")
    return name if code == _CRASHED else None


def _be_child(
    place: Path, action: Callable[[Path], None], number: int, writer: int, *, is_half: bool
) -> None:
    code = 1
    try:
        _install(number, writer, is_half=is_half)
        action(place)
        code = 0
    except BaseException as error:
        _tell(writer, repr(error))
    finally:
        os._exit(code)


_really_write = os.write


def _tell(writer: int, text: str) -> None:
    _really_write(writer, text.encode())


def _install(number: int, writer: int, *, is_half: bool) -> None:
    count = 0

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def changed(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                if is_half:
                    descriptor, body, *offset = arguments
                    function(descriptor, bytes(body)[: len(body) // 2], *offset)
                _tell(writer, f"{number} {name}{' half done' if is_half else ''}")
                os._exit(_CRASHED)
            return function(*arguments, **options)

        return changed

    for name in _CHANGES:
        setattr(os, name, wrap(name, getattr(os, name)))
