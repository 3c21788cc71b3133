"""cache du, verify, purge."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from snapshotter.cli import output
from snapshotter.cli.images import DryRunOption
from snapshotter.cli.session import Command, session_of
from snapshotter.errors import CorruptError, InvalidInputError
from snapshotter.service import control
from snapshotter.service.requesting import image_here

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snapshotter.service.contents import Amount, ImageUse, Usage

cache = typer.Typer(no_args_is_help=True, rich_markup_mode=None, add_completion=False)

_AGE = re.compile(r"([0-9]{1,9})([smhd])")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@cache.command(cls=Command)
def du(context: typer.Context) -> None:
    """Show what is stored here, and for which images.

    OWN is what no other image uses: what `cache purge --image` would free.

    \b
    snapshotter cache du
    snapshotter cache du --json
    """
    from snapshotter.service.contents import read_usage

    session = session_of(context)
    usage = read_usage(session.paths)
    session.write(usage, lambda: _print_usage(usage))


@cache.command(cls=Command)
def verify(
    context: typer.Context,
    dry_run: DryRunOption = False,
) -> None:
    """Read everything that is stored, and remove what is corrupt; it is fetched again when needed.

    Exit status 7 when something was corrupt.

    \b
    snapshotter cache verify
    """
    from snapshotter.service.contents import batches, find_faults

    session = session_of(context)
    checked, faults = 0, {}
    for name, fault in find_faults(session.paths):
        checked += 1
        if fault is not None:
            faults[name] = fault
    removed: list[str] = []
    if faults and not dry_run:
        with session.connect() as client:
            for names in batches(list(faults)):
                answer = client.ask(control.Discard(names=names), control.Discarded)
                removed.extend(answer.names)
            client.ask(control.Refresh(), control.Done)
    found = [{"object": str(name), "fault": fault} for name, fault in faults.items()]
    session.write(
        {"checked": checked, "corrupt": found, "removed": removed},
        lambda: print(
            *(f"{name}: {fault}" for name, fault in faults.items()),
            f"{checked} contents checked, {len(faults)} corrupt, {len(removed)} removed",
            sep="\n",
        ),
    )
    if faults:
        raise CorruptError(f"verify: {len(faults)} of {checked} contents were corrupt")


@cache.command(cls=Command)
def purge(
    context: typer.Context,
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="AGE", help="What arrived longer ago: 90s, 30m, 12h, 7d.", show_default=False
        ),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(metavar="IMAGE", help="What this image alone uses.", show_default=False),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Everything but metadata images.")
    ] = False,
    dry_run: DryRunOption = False,
) -> None:
    """Remove stored content to free disk space; by default what no pulled image uses.

    What is mounted goes on working: open files keep what they have, others are fetched again when
    they are opened. What arrived in the last seconds stays.

    \b
    snapshotter cache purge
    snapshotter cache purge --older-than 7d
    snapshotter cache purge --image debian:12 --dry-run
    """
    from snapshotter.service.contents import batches, choose_for_purge, read_stored

    session = session_of(context)
    older_than_s = None if older_than is None else age_seconds(older_than)
    if everything and (image is not None or older_than is not None):
        raise InvalidInputError("purge: --all takes everything; leave out --image and --older-than")
    with session.connect() as client:
        record = None
        if image is not None:
            record = client.ask(control.Inspect(image=image_here(image)), control.Image).image
        stored = read_stored(session.paths)
        chosen = choose_for_purge(
            session.paths, stored, image=record, older_than_s=older_than_s, everything=everything
        )
        removed, freed_bytes = len(chosen), sum(map(stored.disk_bytes, chosen))
        if not dry_run:
            answers = [
                client.ask(control.Evict(names=names), control.Evicted) for names in batches(chosen)
            ]
            client.ask(control.Refresh(), control.Done)
            removed = sum(answer.removed for answer in answers)
            freed_bytes = sum(answer.freed_bytes for answer in answers)
    said = "would be removed" if dry_run else "removed"
    session.write(
        {
            "removed": removed,
            "freed_bytes": freed_bytes,
            "kept": len(chosen) - removed,
            "dry_run": dry_run,
        },
        lambda: print(f"{removed} contents {said}, {output.size_text(freed_bytes)}"),
    )


def age_seconds(text: str) -> float:
    """The seconds of ``7d``, ``12h``, ``30m`` or ``90s``; InvalidInputError for anything else."""
    match = _AGE.fullmatch(text)
    if match is None:
        raise InvalidInputError(f"age {text!r}: write a number and s, m, h or d, such as 7d")
    return float(int(match[1]) * _UNIT_S[match[2]])


def _print_usage(usage: Usage) -> None:
    output.print_fields(
        [
            ("Objects", _amount(usage.objects)),
            ("Partial files", _amount(usage.partial)),
            ("Metadata images", _amount(usage.metadata)),
            ("Used by no image", _amount(usage.unused)),
            ("Cache server", output.size_text(usage.packs_bytes)),
        ]
    )
    if usage.images:
        print()
        columns = ("NUMBER", "IMAGE", "FILES HERE", "OF", "DISK", "OWN", "IMAGE SIZE")
        output.print_table(columns, [_image_row(use) for use in usage.images])


def _amount(amount: Amount) -> str:
    return f"{amount.contents}, {output.size_text(amount.disk_bytes)}"


def _image_row(use: ImageUse) -> Sequence[str]:
    size = output.size_text
    name = use.references[-1] if use.references else ""
    if use.total is None:
        return (str(use.number), name, "?", "?", "?", "?", "?")
    return (
        str(use.number),
        name,
        str(use.here.contents),
        str(use.total.contents),
        size(use.here.disk_bytes),
        size(use.own.disk_bytes),
        size(use.total.disk_bytes),
    )
