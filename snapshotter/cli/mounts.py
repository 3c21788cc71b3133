"""mount, umount, ps."""

from __future__ import annotations

from typing import Annotated

import typer

from snapshotter.cli import output
from snapshotter.cli.images import AuthfileOption, ImageArgument, PlatformOption
from snapshotter.cli.session import session_of
from snapshotter.service import control, placement
from snapshotter.service.requesting import mount_request

ViewOption = Annotated[
    str,
    typer.Option(
        metavar="VIEW",
        help="auto, kernel, fuse or virtiofs; auto takes the fastest that this host allows.",
    ),
]
UpperOption = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Keep what is written in DIR, for later mounts of the same image. "
        "Default: a private one, removed with the mount.",
        show_default=False,
    ),
]
ReadOnlyOption = Annotated[bool, typer.Option("--read-only", help="Refuse every write.")]
VolatileOption = Annotated[
    bool,
    typer.Option("--volatile", help="Never sync what is written: faster, lost in a power cut."),
]
NosuidOption = Annotated[
    bool, typer.Option("--nosuid", help="Ignore set-uid bits and file capabilities in it.")
]
NodevOption = Annotated[bool, typer.Option("--nodev", help="Ignore device nodes in it.")]


def mount(
    context: typer.Context,
    image: ImageArgument,
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="An existing directory.", show_default=False)
    ],
    platform: PlatformOption = None,
    authfile: AuthfileOption = None,
    view: ViewOption = "auto",
    upper: UpperOption = None,
    read_only: ReadOnlyOption = False,
    volatile: VolatileOption = False,
    nosuid: NosuidOption = False,
    nodev: NodevOption = False,
) -> None:
    """Mount an image on a directory; pulls it first when it is not known.

    Prints the mount's id. Files are fetched when they are first opened.

    \b
    snapshotter mount debian:12 /mnt/debian
    snapshotter mount --read-only oci:./layout:latest /mnt/app
    snapshotter mount --upper ./changes debian:12 /mnt/debian
    snapshotter mount --nosuid --nodev debian:12 /srv/users/7
    """
    session = session_of(context)
    request = mount_request(
        image,
        platform=platform,
        authfile=authfile,
        view=view,
        upper=upper,
        read_only=read_only,
        volatile=volatile,
    )
    target = placement.check_target(directory)
    with session.connect() as client:
        with output.pull_progress(quiet=session.json) as progress:
            mounted, descriptor = client.mount(request, on_progress=progress)
        record = placement.place_and_tell(
            client, mounted.mount, descriptor, target, nosuid=nosuid, nodev=nodev
        )
    session.write(
        {"mount": record, "reason": mounted.reason},
        lambda: print(f"{record.id}  {record.image}  {record.view}  {target}"),
    )


def umount(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="DIR|ID", help="Where it is mounted, or its id.")],
    lazy: Annotated[
        bool, typer.Option("--lazy", help="Detach it even if it is in use; its users can finish.")
    ] = False,
) -> None:
    """Unmount what `mount` made, and drop its private upper.

    \b
    snapshotter umount /mnt/debian
    snapshotter umount --lazy 3f9a0c2b77de
    """
    session = session_of(context)
    with session.connect() as client:
        mounts = client.ask(control.ListMounts(), control.Mounts).mounts
        record = placement.find_mount(mounts, name)
        placement.remove_and_tell(client, record, lazy=lazy)
    session.write({"unmounted": record.id}, lambda: print(record.id))


def ps(context: typer.Context) -> None:
    """List what is mounted, sandboxes of `run` too.

    \b
    snapshotter ps
    snapshotter ps --json
    """
    session = session_of(context)
    with session.connect() as client:
        mounts = client.ask(control.ListMounts(), control.Mounts).mounts
    rows = [
        (
            record.id,
            record.image,
            f"{record.view} (read-only)" if record.read_only else record.view,
            _place(record),
            "private" if record.private_upper else record.upper or "",
            output.age_text(record.created_at_s),
        )
        for record in mounts
    ]
    columns = ("ID", "IMAGE", "VIEW", "WHERE", "UPPER", "AGE")

    def show() -> None:
        output.print_table(columns, rows)
        for record in mounts:
            if record.degraded:
                print(f"{record.id}: {record.degraded}")

    session.write(mounts, show)


def _place(record: control.MountRecord) -> str:
    if record.view == "virtiofs":
        return f"virtual machine of process {record.owner_pid}"
    if record.owner_pid is not None:
        return f"sandbox of process {record.owner_pid}"
    if record.lent:
        return "container of containerd"
    return record.target or "(not placed)"
