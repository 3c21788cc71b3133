"""What commands that run a command of an image have in common."""

from __future__ import annotations

from typing import Annotated

import typer

from snapshotter.cli.session import Command

CommandArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[--] CMD…", help="Default: the image's.", show_default=False),
]
EnvironmentOption = Annotated[
    list[str] | None,
    typer.Option("--env", "-e", metavar="K[=V]", help="Set a variable, or pass on the host's."),
]
WorkdirOption = Annotated[
    str | None,
    typer.Option("--workdir", "-w", metavar="DIR", help="Where to start; made if missing."),
]
UserOption = Annotated[
    str | None,
    typer.Option("--user", "-u", metavar="USER[:GROUP]", help="Names of the image, or ids."),
]
EntrypointOption = Annotated[
    str | None,
    typer.Option(metavar="PROGRAM", help="Instead of the image's; empty for none."),
]


class RunCommand(Command):
    """Words after the image are the command's, and so are exit statuses below 125."""

    foreign_after = 1
    failure_status = 125
