"""What every command shares: the program's options, the daemon, and how results are written."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import typer
from typer.core import TyperCommand, TyperGroup

from snapshotter.cli.arguments import split
from snapshotter.paths import Paths, default_paths
from snapshotter.service.control_client import ControlClient


@dataclass(slots=True)
class Session:
    """The program's options. ``paths`` are settled when they are first asked for."""

    root: str | None = None
    run: str | None = None
    config: Path | None = None
    json: bool = False
    failure_status: int | None = None

    @property
    def paths(self) -> Paths:
        """Where the daemon of these options is."""
        return default_paths(self.root, self.run)

    def connect(self) -> ControlClient:
        """A connection to the daemon, started when it is not running."""
        from snapshotter.service.daemon_process import connect_or_start

        return connect_or_start(self.paths, config=self.config)

    def take(self, options: Sequence[str]) -> None:
        """Sets what program options (as ``arguments.split`` found them) say."""
        words = list(options)
        while words:
            name, equals, value = words.pop(0).partition("=")
            if name == "--json":
                self.json = True
                continue
            if not equals:
                if not words:
                    raise typer.BadParameter(f"{name} needs a value")
                value = words.pop(0)
            if name == "--config":
                self.config = Path(value)
            else:
                setattr(self, name.removeprefix("--"), value)

    def write(self, value: object, text: Callable[[], None]) -> None:
        """One JSON document of ``value`` with --json, else whatever ``text`` prints."""
        if not self.json:
            text()
            return
        raw = msgspec.json.format(msgspec.json.encode(value), indent=2)
        sys.stdout.write(raw.decode() + "\n")


def session_of(context: typer.Context) -> Session:
    """The session of the command that runs."""
    return context.find_root().ensure_object(Session)


class Command(TyperCommand):
    """A command that takes the program's options too, and knows where foreign words begin."""

    foreign_after: int | None = None
    """After how many positional arguments the words are another program's; None: never."""
    failure_status: int | None = None
    """Exit status of every failure of ours; None: each error has its own."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parses what is left once the program's options were taken."""
        values = [
            name
            for parameter in self.params
            if not getattr(parameter, "is_flag", True)
            for name in parameter.opts
        ]
        parts = split(args, value_options=values, positionals=self.foreign_after)
        session = session_of(ctx)
        session.failure_status = self.failure_status
        session.take(parts.of_program)
        return super().parse_args(ctx, list(parts.of_command))


class Group(TyperGroup):
    """A group that is a command, too, when no other follows; it takes the program's options."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parses what is left once the program's options were taken."""
        parts = split(args, value_options=())
        session_of(ctx).take(parts.of_program)
        return super().parse_args(ctx, list(parts.of_command))
