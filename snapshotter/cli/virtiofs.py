"""virtiofs: an image as a virtio-fs device, for a VMM."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from snapshotter.authfiles import chosen_authfile
from snapshotter.cli import output
from snapshotter.cli.images import AuthfileOption, ImageArgument, PlatformOption
from snapshotter.cli.session import session_of
from snapshotter.errors import InvalidInputError
from snapshotter.service import control
from snapshotter.service.requesting import architecture_of, image_here


def virtiofs(
    context: typer.Context,
    image: ImageArgument,
    socket: Annotated[
        Path,
        typer.Option(
            metavar="PATH",
            help="Where the VMM is to connect. It appears when everything is ready, and takes "
            "one connection.",
        ),
    ],
    platform: PlatformOption = None,
    authfile: AuthfileOption = None,
    upper: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Keep what the guest writes in DIR, for later views of the same image.",
            show_default=False,
        ),
    ] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="Refuse every write.")] = False,
    contents: Annotated[
        bool,
        typer.Option(
            "--contents",
            help="Serve no tree but all contents by name, for a guest whose kernel has the names.",
        ),
    ] = False,
) -> None:
    """Serve an image to a virtual machine as a vhost-user file system, without a mount here.

    Runs until the VMM hangs up. The guest must unmount before this ends: without it, it hangs.

    \b
    snapshotter virtiofs debian:12 --socket /run/vm7.sock --upper /srv/vm7
    qemu-system-x86_64 … -object memory-backend-memfd,id=mem,size=1G,share=on \\
        -machine q35,memory-backend=mem -chardev socket,id=fs,path=/run/vm7.sock \\
        -device vhost-user-fs-pci,chardev=fs,tag=image
    In the guest: mount -t virtiofs image /mnt
    """
    from snapshotter.config import load_config
    from snapshotter.service import virtiofs_view

    if [upper is not None, read_only, contents].count(True) != 1:
        raise InvalidInputError("give one of --upper DIR, --read-only and --contents")
    session = session_of(context)
    request = control.Mount(
        image=image_here(image),
        architecture=architecture_of(platform),
        authfile=chosen_authfile(authfile),
        view="virtiofs",
        upper=None if upper is None else os.path.realpath(upper),
        read_only=upper is None,
        owner_pid=os.getpid(),
    )
    with session.connect() as client, output.pull_progress(quiet=session.json) as progress:
        mounted, descriptor = client.mount(request, on_progress=progress)
    os.close(descriptor)
    record = mounted.image
    paths = session.paths
    options = virtiofs_view.make_options(
        paths,
        load_config(session.config or paths.root / "config.toml"),
        record,
        socket=socket.absolute(),
        upper=None if upper is None else Path(os.path.realpath(upper)),
        contents_only=contents,
    )
    virtiofs_view.become(options)
