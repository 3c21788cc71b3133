"""rpull."""

from __future__ import annotations

from types import ModuleType
from typing import Annotated

import typer

from snapshotter.authfiles import chosen_authfile
from snapshotter.cli import output
from snapshotter.cli.images import AuthfileOption, PlatformOption
from snapshotter.cli.session import session_of
from snapshotter.errors import UnsupportedError
from snapshotter.references import registry_name
from snapshotter.service import control
from snapshotter.service.requesting import architecture_of


def rpull(
    context: typer.Context,
    image: Annotated[
        str,
        typer.Argument(
            metavar="IMAGE",
            help="In a registry: debian:12, registry.example/team/app@sha256:…",
            show_default=False,
        ),
    ],
    address: Annotated[
        str,
        typer.Option(metavar="SOCKET", envvar="CONTAINERD_ADDRESS", help="containerd's socket."),
    ] = "/run/containerd/containerd.sock",
    namespace: Annotated[
        str,
        typer.Option(
            "--namespace",
            "-n",
            metavar="NAME",
            envvar="CONTAINERD_NAMESPACE",
            help="In containerd.",
        ),
    ] = "default",
    snapshotter: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="What containerd's config calls this snapshotter in proxy_plugins."
        ),
    ] = "snapshotter",
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
    """Make an image known to containerd: names only, no layer is downloaded by it.

    Containers of it then start through this snapshotter, on any containerd.

    \b
    snapshotter rpull debian:12
    ctr run --rm --snapshotter snapshotter docker.io/library/debian:12 box cat /etc/os-release
    """
    containerd = _containerd()
    session = session_of(context)
    name = registry_name(image)
    request = control.Pull(
        image=f"docker://{name}",
        architecture=architecture_of(platform),
        refresh=refresh,
        authfile=chosen_authfile(authfile),
    )
    with session.connect() as client, output.pull_progress(quiet=session.json) as progress:
        record = client.ask(request, control.Image, on_progress=progress).image
        asked = control.Documents(image=record.handle)
        documents = client.ask(asked, control.ImageDocuments).documents
    made = containerd.image_documents(name, record.prepared, documents)
    with containerd.ContainerdClient(address, namespace) as connection:
        outcome = containerd.rpull(connection, snapshotter, made)
    document = {
        "name": name,
        "digest": made.target.digest,
        "manifest": made.manifest.digest,
        "architecture": record.prepared.architecture,
        "chain_id": made.chain_id,
        "layers": len(made.layers),
        "namespace": namespace,
        "snapshotter": snapshotter,
        "created": outcome.created,
        "healed": outcome.healed,
    }
    session.write(document, lambda: print(_summary(document)))


def _containerd() -> ModuleType:
    """What speaks to containerd; UnsupportedError where its packages are not installed."""
    try:
        from snapshotter.containerd import rpull as module
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"rpull: {error}; containerd is spoken to by grpcio and protobuf:"
            " pip install 'lazy-snapshotter[containerd]'"
        ) from error
    return module


def _summary(document: dict[str, object]) -> str:
    said = f"{document['name']}  {document['digest']}  {document['layers']} layers"
    if document["healed"]:
        said += f"  ({document['healed']} lost snapshots were made anew)"
    return said
