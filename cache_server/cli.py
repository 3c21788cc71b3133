"""The ``cache-server`` command. Heavy imports wait until a command needs them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, Optional

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from cache_server.library import StoredImage
    from snapshotter.cache_v1.protocol import Prepared, Progress

_HELP = """Turns container images into content that snapshotters fetch piece by piece.

The snapshotter's daemon starts one by itself. Run one on your own to prepare images ahead, or to
share one among several daemons of a host:

\b
  cache-server import docker://docker.io/library/debian:12
  cache-server images
  cache-server gc
  cache-server serve --socket /run/snapshotter/cache.sock

Exit codes: 0 done, 1 failed, 2 bad input, 3 not found, 4 access denied, 5 unavailable (try
again), 6 busy, 7 corrupt, 8 not supported,
9 disk full.
"""

app = typer.Typer(
    name="cache-server",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

images_group = typer.Typer(invoke_without_command=True, rich_markup_mode=None, add_completion=False)
app.add_typer(images_group, name="images")

_WARNING = 30

RootOption = Annotated[
    Optional[Path],  # noqa: UP045 - typer evaluates it
    typer.Option(
        "--root", help="Where packs and catalog are. Default: as the daemon's.", show_default=False
    ),
]
TokenOption = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "--token-file", help="A file with the secret that requests must carry.", show_default=False
    ),
]
ImageArgument = Annotated[
    str,
    typer.Argument(
        help="docker://HOST/NAME[:TAG][@DIGEST], NAME[:TAG], oci:DIR[:TAG], oci-archive:FILE[:TAG]"
        " or docker-archive:FILE[:NAME[:TAG]]."
    ),
]
PlatformOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--platform",
        "--architecture",
        metavar="OS/ARCH",
        help="Of a multi-platform image: linux/arm64, linux/arm/v7, arm64. Default: this host's.",
        show_default=False,
    ),
]
RefreshOption = Annotated[
    bool, typer.Option("--refresh", help="Ask the registry whether the tag has moved.")
]
AuthfileOption = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "--authfile",
        metavar="FILE",
        help="Credentials as podman and docker keep them. Default: $REGISTRY_AUTH_FILE, "
        "$DOCKER_CONFIG/config.json, or where podman and docker log in.",
        show_default=False,
    ),
]
LimitOption = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        "--limit",
        metavar="NAME=NUMBER",
        help="How large a layer or image may be, such as layer_bytes=50G; may be repeated. "
        "A name that is none lists them all.",
        show_default=False,
    ),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")]
InsecureOption = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        "--insecure-registry",
        metavar="HOST[:PORT]",
        help="Ask this registry in plain HTTP, as those on loopback are. May be repeated.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def main() -> None:
    """Runs the command line; our errors become one line on stderr and an exit code."""
    from snapshotter.errors import SnapshotterError

    try:
        app()
    except SnapshotterError as error:
        _fail(str(error), error.exit_code)
    except OSError as error:
        _fail(str(error), 1)
    except KeyboardInterrupt:
        sys.exit(130)


def _print_version(wanted: bool) -> None:
    from snapshotter import __version__

    if wanted:
        print(f"cache-server {__version__}")
        raise typer.Exit


@app.callback(help=_HELP)
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """The options of the program itself."""


@app.command()
def serve(
    root: RootOption = None,
    socket: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--socket", help="The Unix socket to serve on.", show_default=False),
    ] = None,
    token_file: TokenOption = None,
    limit: LimitOption = None,
    insecure_registry: InsecureOption = None,
    log_level: Annotated[str, typer.Option("--log-level", help="info or debug.")] = "info",
) -> None:
    """Serve images to snapshotters until SIGTERM.

    Only this user and root can connect. The log goes to stderr, one JSON object a line.
    """
    from cache_server import serving
    from cache_server.limits import parse_limits
    from cache_server.sources.network import settings_with
    from snapshotter.errors import InvalidInputError
    from snapshotter.paths import default_paths
    from snapshotter.telemetry import configure_logging

    if log_level not in ("info", "debug"):
        raise InvalidInputError(f"--log-level {log_level}: write info or debug")
    configure_logging("cache-server", verbose=log_level == "debug")
    paths = default_paths()
    serving.serve(
        root or paths.server_root,
        (socket or paths.cache_socket).absolute(),
        token=_token(token_file),
        limits=parse_limits(limit or ()),
        network=settings_with(insecure_registry or ()),
    )


@app.command(name="import")
def import_(
    image: ImageArgument,
    root: RootOption = None,
    platform: PlatformOption = None,
    refresh: RefreshOption = False,
    authfile: AuthfileOption = None,
    insecure_registry: InsecureOption = None,
    token_file: TokenOption = None,
    limit: LimitOption = None,
    json: JsonOption = False,
) -> None:
    """Make an image ready: download its layers, and merge what they say.

    An image that is known already is answered at once; --refresh asks its registry anew. If a
    server runs on the root, it is asked to do the work.

    \b
      cache-server import debian:12
      cache-server import --refresh docker://127.0.0.1:5000/tools:latest
      cache-server import oci-archive:./app.tar:v1 --platform linux/arm64
    """
    import structlog

    from cache_server.importing import import_image
    from cache_server.limits import parse_limits
    from cache_server.sources.network import settings_with
    from snapshotter.authfiles import chosen_authfile
    from snapshotter.cache_v1.protocol import Prepare
    from snapshotter.paths import default_paths
    from snapshotter.platforms import host_architecture, parse_platform
    from snapshotter.references import absolute_image

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(_WARNING))
    request = Prepare(
        image=absolute_image(image, os.getcwd()),
        architecture=parse_platform(platform) if platform else host_architecture(),
        refresh=refresh,
        progress=True,
        authfile=chosen_authfile(authfile),
    )
    with _ProgressBar(image) as bar:
        prepared = import_image(
            root or default_paths().server_root,
            request,
            bar.show,
            token=_token(token_file),
            limits=parse_limits(limit or ()),
            network=settings_with(insecure_registry or ()),
        )
    _print_prepared(image, prepared, as_json=json)


@images_group.callback()
def images(context: typer.Context, root: RootOption = None, json: JsonOption = False) -> None:
    """List the images that are ready, oldest first."""
    from cache_server.catalog import Catalog
    from snapshotter.paths import default_paths

    if context.invoked_subcommand is not None:
        return
    catalog_path = (root or default_paths().server_root) / "catalog.db"
    stored: list[StoredImage] = []
    if catalog_path.exists():
        catalog = Catalog(catalog_path)
        try:
            stored = catalog.images()
        finally:
            catalog.close()
    if json:
        _print_json(stored)
    else:
        _print_table(stored)


@images_group.command(name="rm")
def remove(
    image: Annotated[str, typer.Argument(help="A name, digest or handle.", metavar="IMAGE")],
    root: RootOption = None,
    platform: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="OS/ARCH", help="Needed where several platforms have that name."),
    ] = None,
    token_file: TokenOption = None,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Forget an image, or one of its names where it has several.

    Its content goes with the next `gc`. Only forget what no snapshotter has mounted or will mount
    by its record: after the gc it cannot be fetched any more.
    """
    from cache_server.tending import tend
    from snapshotter.cache_v1.protocol import Remove, Removed
    from snapshotter.paths import default_paths
    from snapshotter.platforms import parse_platform
    from snapshotter.references import absolute_image

    request = Remove(
        image=absolute_image(image, os.getcwd()),
        architecture=parse_platform(platform) if platform else None,
        dry_run=dry_run,
    )
    removed = tend(root or default_paths().server_root, request, token=_token(token_file))
    if json:
        _print_json(removed)
        return
    assert isinstance(removed, Removed)
    what = "image" if removed.whole else "name"
    names = ", ".join(removed.names) or removed.handle
    print(f"{what} {'would be removed' if dry_run else 'removed'}: {names}")


@app.command()
def gc(
    root: RootOption = None,
    token_file: TokenOption = None,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Remove layers and content that no image needs, and give their disk space back.

    Fetches go on meanwhile; while images are being prepared it is refused (exit code 6). If a
    server runs on the root, it is asked to do the work.

    \b
      cache-server images rm debian:11
      cache-server gc
    """
    from cache_server.tending import tend
    from snapshotter.cache_v1.protocol import Collect, Collected
    from snapshotter.paths import default_paths

    request = Collect(dry_run=dry_run)
    collected = tend(root or default_paths().server_root, request, token=_token(token_file))
    if json:
        _print_json(collected)
        return
    assert isinstance(collected, Collected)
    print(
        f"{collected.layers} layers and {collected.chunks} chunks"
        f" {'would be removed' if dry_run else 'removed'},"
        f" {collected.packs_dropped} packs dropped and {collected.packs_rewritten} rewritten,"
        f" {collected.freed_bytes:,} bytes freed"
    )


class _ProgressBar:
    """A bar on stderr if that is a terminal, else nothing."""

    def __init__(self, image: str) -> None:
        self._image = image
        self.show: Callable[[Progress], None] = lambda progress: None

    def __enter__(self) -> _ProgressBar:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

            self._bar = Progress(
                "{task.description}",
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(f"{self._image}: resolve", total=None)
            self.show = self._update
        return self

    def __exit__(self, *_: object) -> None:
        if sys.stderr.isatty():
            self._bar.stop()

    def _update(self, progress: Progress) -> None:
        self._bar.update(
            self._task,
            description=f"{self._image}: {progress.phase}",
            completed=progress.done_bytes,
            total=progress.total_bytes,
        )


def _print_prepared(image: str, prepared: Prepared, *, as_json: bool) -> None:
    if as_json:
        _print_json(prepared)
        return
    totals = prepared.totals
    size = f", {totals.files:,} files, {totals.bytes:,} bytes" if totals else ""
    print(f"{image}: ready ({prepared.architecture}{size}, {len(prepared.layers)} layers)")
    print(prepared.digest)


def _print_table(stored: list[StoredImage]) -> None:
    rows = [
        (
            ", ".join(image.references) or "-",
            image.prepared.architecture,
            (image.prepared.digest or "-").removeprefix("sha256:")[:12],
            str(image.prepared.totals.files) if image.prepared.totals else "-",
            str(image.prepared.totals.bytes) if image.prepared.totals else "-",
        )
        for image in stored
    ]
    titles = ("REFERENCE", "ARCHITECTURE", "DIGEST", "FILES", "BYTES")
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    for row in (titles, *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def _print_json(value: object) -> None:
    import msgspec

    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value)).decode() + "\n")


def _token(path: Path | None) -> str | None:
    from snapshotter.errors import InvalidInputError

    if path is None:
        return None
    token = path.read_text().strip()
    if not token:
        raise InvalidInputError(f"token file {path}: it is empty")
    return token


def _fail(message: str, exit_code: int) -> NoReturn:
    print(f"cache-server: {message}", file=sys.stderr)
    sys.exit(exit_code)
