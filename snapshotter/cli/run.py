"""run: a command in a sandbox. Exit statuses are the command's, or 125 to 127 as engines have."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from snapshotter.cli import output
from snapshotter.cli.command_options import (
    CommandArgument,
    EntrypointOption,
    EnvironmentOption,
    UserOption,
    WorkdirOption,
)
from snapshotter.cli.images import AuthfileOption, ImageArgument, PlatformOption
from snapshotter.cli.mounts import ReadOnlyOption, UpperOption, ViewOption
from snapshotter.cli.session import session_of
from snapshotter.service.requesting import mount_request


def run(
    context: typer.Context,
    image: ImageArgument,
    command: CommandArgument = None,
    environment: EnvironmentOption = None,
    workdir: WorkdirOption = None,
    volumes: Annotated[
        list[str] | None,
        typer.Option(
            "--volume", "-v", metavar="SRC:DST[:ro]", help="Show a host file or directory at DST."
        ),
    ] = None,
    user: UserOption = None,
    entrypoint: EntrypointOption = None,
    hostname: Annotated[
        str | None, typer.Option(metavar="NAME", help="Default: the mount's id.")
    ] = None,
    platform: PlatformOption = None,
    authfile: AuthfileOption = None,
    view: ViewOption = "auto",
    upper: UpperOption = None,
    read_only: ReadOnlyOption = False,
) -> None:
    """Run a command in an image, in a sandbox that is gone when it ends.

    Own files, processes, hostname and IPC; the network is the host's. The capabilities are those
    of container engines without MKNOD, no_new_privs is set, there is no seccomp filter: for code
    you would run in a container, not a wall against a hostile one.

    \b
    snapshotter run debian:12 -- ls /etc
    snapshotter run debian:12 bash
    snapshotter run -e DEBUG=1 -v .:/src:ro -w /src python:3.12 python -m pytest

    Exit status: the command's (128+n when signal n ended it); 125 when we failed, 126 when the
    command cannot be executed, 127 when it is not there.
    """
    from snapshotter.service import sandbox
    from snapshotter.service.sandbox_spec import Settings, parse_environment, parse_volume

    session = session_of(context)
    settings = Settings(
        command=command or (),
        entrypoint=entrypoint,
        environment=parse_environment(environment or (), os.environ),
        volumes=[parse_volume(text, os.getcwd()) for text in volumes or ()],
        user=user,
        workdir=workdir,
        hostname=hostname,
    )
    request = mount_request(
        image,
        platform=platform,
        authfile=authfile,
        view=view,
        upper=upper,
        read_only=read_only,
        owner_pid=os.getpid(),
    )
    sandbox.check(settings)
    with session.connect() as client:
        with output.pull_progress(quiet=session.json) as progress:
            mounted, descriptor = client.mount(request, on_progress=progress)
        try:
            status = sandbox.run(client, mounted, descriptor, settings, staging=session.paths.run)
        except sandbox.SandboxError as error:
            session.failure_status = error.status
            raise
    sys.exit(status)
