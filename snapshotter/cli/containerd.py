"""containerd serve and config."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from snapshotter.authfiles import chosen_authfile
from snapshotter.cli.images import AuthfileOption
from snapshotter.cli.session import Command, session_of
from snapshotter.errors import NotFoundError, UnsupportedError

containerd = typer.Typer(no_args_is_help=True, rich_markup_mode=None, add_completion=False)

StateOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Where records and directories of snapshots are. Default: containerd below the root. "
        "Each containerd needs one of its own.",
        show_default=False,
    ),
]
SocketOption = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="The socket that containerd connects to. Default: containerd.sock in the run "
        "directory.",
        show_default=False,
    ),
]


@containerd.command(cls=Command)
def serve(
    context: typer.Context,
    state: StateOption = None,
    socket: SocketOption = None,
    authfile: AuthfileOption = None,
) -> None:
    """Serve containerd as its proxy snapshotter, in the foreground, until SIGTERM.

    Restarting it disturbs no container. Logs JSON lines to stderr.

    \b
    snapshotter containerd serve
    snapshotter containerd serve --state /data/second --socket /run/second.sock
    """
    from snapshotter.telemetry import configure_logging

    session = session_of(context)
    try:
        from snapshotter.containerd.serving import Service
        from snapshotter.containerd.serving import serve as serve_until_signal
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    configure_logging("containerd")
    paths = session.paths
    serve_until_signal(
        Service(
            paths=paths,
            state=(state or paths.containerd_state).absolute(),
            socket=(socket or paths.containerd_socket).absolute(),
            config=session.config,
            authfile=chosen_authfile(authfile),
        )
    )


@containerd.command(cls=Command)
def config(
    context: typer.Context,
    version: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="VERSION",
            help="The version of containerd, such as 1.7. Default: that of the one installed.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str, typer.Option(metavar="NAME", help="What containerd is to call this snapshotter.")
    ] = "snapshotter",
    state: StateOption = None,
    socket: SocketOption = None,
) -> None:
    """Print what containerd's config.toml needs to use this snapshotter.

    \b
    snapshotter containerd config
    snapshotter containerd config --for 2.1 --name lazy
    """
    from snapshotter.containerd import setting_up

    session = session_of(context)
    found = setting_up.parse_version(version) if version else setting_up.installed_version()
    if found is None:
        raise NotFoundError("containerd is not installed here; name its version with --for")
    paths = session.paths
    text = setting_up.fragment(
        found,
        name=name,
        service_socket=(socket or paths.containerd_socket).absolute(),
        state=(state or paths.containerd_state).absolute(),
    )
    session.write({"config": text}, lambda: print(text, end=""))


def _missing(error: ModuleNotFoundError) -> UnsupportedError:
    return UnsupportedError(
        f"containerd: {error.name} is not installed; pip install 'lazy-snapshotter[containerd]'"
    )
