"""pull, images, images rm, inspect."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import msgspec
import typer

from snapshotter.authfiles import chosen_authfile
from snapshotter.cli import output
from snapshotter.cli.session import Command, Group, session_of
from snapshotter.decoding import DECODE_ERRORS
from snapshotter.service import control
from snapshotter.service.requesting import architecture_of, image_here
from snapshotter.store.images import ImageRecord

images_group = typer.Typer(
    cls=Group, invoke_without_command=True, rich_markup_mode=None, add_completion=False
)
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")]
ImageArgument = Annotated[
    str,
    typer.Argument(
        metavar="IMAGE",
        help="debian:12, registry.example/team/app@sha256:…, oci:DIR:TAG, "
        "oci-archive:FILE:TAG, docker-archive:FILE:NAME:TAG",
        show_default=False,
    ),
]
PlatformOption = Annotated[
    str | None,
    typer.Option(
        "--platform",
        "--architecture",
        metavar="OS/ARCH",
        help="Of a multi-platform image: linux/arm64, linux/arm/v7, arm64. Default: this host's.",
        show_default=False,
    ),
]
AuthfileOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Credentials as podman and docker keep them. Default: $REGISTRY_AUTH_FILE, "
        "$DOCKER_CONFIG/config.json, or where podman and docker log in.",
        show_default=False,
    ),
]


def pull(
    context: typer.Context,
    image: ImageArgument,
    platform: PlatformOption = None,
    authfile: AuthfileOption = None,
    refresh: Annotated[
        bool,
        typer.Option(
            "--refresh/--no-refresh",
            help="Ask the registry what a tag means now; without, a known image is taken as it is.",
        ),
    ] = True,
) -> None:
    """Make an image known here: its index and metadata, not its files.

    Files come when something opens them.

    \b
    snapshotter pull debian:12
    snapshotter pull oci:./build/layout:latest
    snapshotter pull --platform arm64 --json alpine:3
    """
    session = session_of(context)
    request = control.Pull(
        image=image_here(image),
        architecture=architecture_of(platform),
        refresh=refresh,
        authfile=chosen_authfile(authfile),
    )
    with session.connect() as client, output.pull_progress(quiet=session.json) as progress:
        record = client.ask(request, control.Image, on_progress=progress).image
    session.write(_document(record), lambda: print(_summary(record)))


@images_group.callback()
def images(context: typer.Context) -> None:
    """List the images that were pulled.

    \b
    snapshotter images
    snapshotter images --json
    snapshotter images rm debian:12
    """
    if context.invoked_subcommand is not None:
        return
    session = session_of(context)
    with session.connect() as client:
        records = client.ask(control.ListImages(), control.Images).images
    rows = [
        (
            str(record.number),
            record.references[-1],
            _short(record),
            record.prepared.architecture,
            _files(record),
            _size(record),
            output.age_text(record.pulled_at_s),
        )
        for record in records
    ]
    columns = ("NUMBER", "IMAGE", "DIGEST", "ARCH", "FILES", "SIZE", "PULLED")
    session.write(
        [_document(record) for record in records], lambda: output.print_table(columns, rows)
    )


@images_group.command(name="rm", cls=Command)
def remove(
    context: typer.Context,
    image: Annotated[
        str, typer.Argument(metavar="IMAGE", help="A name, number, digest or handle.")
    ],
    dry_run: DryRunOption = False,
) -> None:
    """Forget a pulled image, or one of its names; exit status 6 while it is mounted.

    Content that it has fetched stays until `snapshotter cache purge`.

    \b
    snapshotter images rm debian:12
    """
    session = session_of(context)
    request = control.RemoveImage(image=image_here(image), dry_run=dry_run)
    with session.connect() as client:
        removed = client.ask(request, control.Removed)
    said = "would be removed" if dry_run else "removed"
    names = ", ".join(removed.names) or image
    what = f"image {removed.image.number}" if removed.whole else "name"
    session.write(
        {
            "number": removed.image.number,
            "names": removed.names,
            "whole": removed.whole,
            "dry_run": dry_run,
        },
        lambda: print(f"{what} {said}: {names}"),
    )


def inspect(context: typer.Context, image: ImageArgument) -> None:
    """Show a pulled image: digest, layers, command, environment.

    IMAGE may also be its number, digest or handle.

    \b
    snapshotter inspect debian:12
    snapshotter inspect 3 --json
    """
    session = session_of(context)
    with session.connect() as client:
        request = control.Inspect(image=image_here(image))
        record = client.ask(request, control.Image).image
    session.write(_document(record), lambda: _describe(record))


def _document(record: ImageRecord) -> dict[str, object]:
    """The record for JSON, the image's config as a part of it instead of a string."""
    document: dict[str, object] = msgspec.to_builtins(record)
    config = record.prepared.config
    prepared = msgspec.to_builtins(record.prepared)
    if config is not None:
        with suppress(*DECODE_ERRORS):  # shown as it is, then
            prepared["config"] = msgspec.json.decode(config)
    return {**document, "prepared": prepared}


def _short(record: ImageRecord) -> str:
    name = record.prepared.digest or record.handle
    return name.removeprefix("sha256:")[:12]


def _files(record: ImageRecord) -> str:
    totals = record.prepared.totals
    return "" if totals is None else str(totals.files)


def _size(record: ImageRecord) -> str:
    totals = record.prepared.totals
    return "" if totals is None else output.size_text(totals.bytes)


def _summary(record: ImageRecord) -> str:
    prepared = record.prepared
    said = [record.references[-1], _short(record)]
    if prepared.totals is not None:
        said.append(f"{prepared.totals.files} files, {_size(record)}")
    return "  ".join(said)


def _describe(record: ImageRecord) -> None:
    prepared = record.prepared
    fields = [
        ("Image", record.references[-1]),
        ("Other names", ", ".join(record.references[:-1])),
        ("Number", str(record.number)),
        ("Digest", prepared.digest or ""),
        ("Handle", record.handle),
        ("Architecture", prepared.architecture),
        ("Files", _files(record)),
        ("Size", _size(record)),
        ("Entrypoint", " ".join(prepared.entrypoint or [])),
        ("Command", " ".join(prepared.cmd or [])),
        *(("Environment", f"{name}={value}") for name, value in prepared.env.items()),
        *(
            ("Layer", f"{layer.digest}  {output.size_text(layer.size)}")
            for layer in prepared.layers
        ),
    ]
    output.print_fields([(name, value) for name, value in fields if value])
