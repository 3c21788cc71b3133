"""The ``snapshotter`` command: its options, its commands, and what errors become at its exit."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from snapshotter import __version__
from snapshotter.cli import cache, containerd, host, images, mounts
from snapshotter.cli import rpull as rpull_module
from snapshotter.cli import run as run_module
from snapshotter.cli import vm as vm_module
from snapshotter.cli.command_options import RunCommand
from snapshotter.cli.session import Command, Session
from snapshotter.cli.virtiofs import virtiofs
from snapshotter.errors import InvalidInputError, SnapshotterError

_EPILOG = (
    "--root, --run, --config and --json may stand before or after the command. "
    "Exit status: 0 done, 1 failed, 2 bad input, 3 not found, 4 access denied, 5 unavailable, "
    "6 busy, 7 corrupt, 8 unsupported, 9 disk full; `run` has the command's own, or 125, 126, 127."
)
_INTERRUPTED = 130

# typer's usage errors have one ancestor, of which only this descendant is public.
_USAGE_ERRORS: type[typer.BadParameter] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)

app = typer.Typer(
    name="snapshotter",
    no_args_is_help=True,
    rich_markup_mode=None,  # rich costs as much at start as all the rest
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=_EPILOG,
)
app.command(cls=Command)(images.pull)
app.command(cls=Command)(rpull_module.rpull)
app.command(cls=Command)(mounts.mount)
app.command(cls=Command)(mounts.umount)
app.command(cls=RunCommand)(run_module.run)
app.command(cls=Command)(mounts.ps)
app.command(cls=Command)(virtiofs)
app.add_typer(images.images_group, name="images")
app.command(cls=Command)(images.inspect)
app.command(cls=Command)(host.doctor)
app.add_typer(cache.cache, name="cache", help="See, verify and free what is stored here.")
app.add_typer(
    containerd.containerd, name="containerd", help="Serve containerd, and how to set it up."
)
app.add_typer(vm_module.vm, name="vm", help="Run images in virtual machines.")
app.add_typer(host.daemon, name="daemon", help="Start, stop and see the daemon.")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"snapshotter {__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    root: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Where content and records are. Default: /var/lib/snapshotter as root, "
            "or $SNAPSHOTTER_ROOT.",
            show_default=False,
        ),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Where sockets and logs are. Default: /run/snapshotter as root, "
            "below a --root that was given, or $SNAPSHOTTER_RUN.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Settings for a daemon that this command starts. Default: config.toml below "
            "the root.",
            show_default=False,
        ),
    ] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Write one JSON document; errors as JSON on stderr.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Mount container images at once and fetch only what is touched.

    \b
    snapshotter run debian:12 -- cat /etc/os-release
    snapshotter mount debian:12 /mnt && ls /mnt; snapshotter umount /mnt
    snapshotter doctor
    """
    session = context.ensure_object(Session)
    session.root, session.run, session.config, session.json = root, run, config, json_output


def main() -> None:
    """The entry point; ends the process with the exit status of what happened."""
    session = Session()
    try:
        status = app(sys.argv[1:], standalone_mode=False, obj=session)
        sys.stdout.flush()
    except SnapshotterError as error:
        status = _fail(session, error.code, str(error), session.failure_status or error.exit_code)
    except typer.Abort:
        status = _INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        status = 1
    except _USAGE_ERRORS as error:
        status = _fail_usage(session, error)
    sys.exit(status if isinstance(status, int) else 0)


def _fail(session: Session, code: str, message: str, status: int) -> int:
    """Says what went wrong, on stderr; the exit status."""
    if session.json:
        text = msgspec.json.encode({"error": {"code": code, "message": message}}).decode()
    else:
        text = f"snapshotter: {message}"
    print(text, file=sys.stderr)
    return status


def _fail_usage(session: Session, error: typer.BadParameter) -> int:
    status = session.failure_status or InvalidInputError.exit_code
    if session.json:
        return _fail(session, InvalidInputError.code, error.format_message(), status)
    error.show()
    return status


if __name__ == "__main__":
    main()
