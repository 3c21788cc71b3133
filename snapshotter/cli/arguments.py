"""What typer does not do: options of the whole program anywhere, and where a command begins.

Pure; main.py and the commands use it before typer sees the arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

GLOBAL_VALUES = ("--root", "--run", "--config")
GLOBAL_FLAGS = ("--json",)


@dataclass(frozen=True, slots=True)
class Split:
    """Arguments of one command: what belongs to the program, and what to the command."""

    of_program: Sequence[str]
    of_command: Sequence[str]


def split(
    arguments: Sequence[str], *, value_options: Collection[str], positionals: int | None = None
) -> Split:
    """Takes the program's options out of a command's arguments.

    ``value_options`` are the command's own options that take a value. After ``--``, or after
    ``positionals`` of them, come words that are not ours: they are left alone, with ``--`` before
    them, so that ``run IMAGE ls -l`` gives ``-l`` to ``ls``.
    """
    program: list[str] = []
    command: list[str] = []
    seen = 0
    rest = list(arguments)
    while rest:
        word = rest[0]
        if word == "--":
            return Split(program, [*command, *rest])
        if not word.startswith("-") or word == "-":
            if seen == positionals:
                return Split(program, [*command, "--", *rest])
            seen += 1
        name, equals, _ = word.partition("=")
        is_global = name in GLOBAL_VALUES or word in GLOBAL_FLAGS
        takes_next = not equals and (name in GLOBAL_VALUES or word in value_options)
        taken = 2 if takes_next and word.startswith("-") else 1
        (program if is_global else command).extend(rest[:taken])
        del rest[:taken]
    return Split(program, command)
