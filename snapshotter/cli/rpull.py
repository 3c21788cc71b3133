"""rpull."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from snapshotter.authfiles import chosen_authfile
from snapshotter.cache_v1.protocol import Prepared
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
    _check_packages()
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
    document = {
        "namespace": namespace,
        "snapshotter": snapshotter,
        **_into_containerd(address, namespace, snapshotter, name, record.prepared, documents),
    }
    session.write(document, lambda: print(_summary(document)))


def _into_containerd(
    address: str,
    namespace: str,
    snapshotter: str,
    name: str,
    prepared: Prepared,
    documents: Sequence[str],
) -> dict[str, object]:
    """Makes the image known there; what was done."""
    from snapshotter.containerd.client import ContainerdClient
    from snapshotter.containerd.image_documents import image_documents
    from snapshotter.containerd.rpull import rpull

    image = image_documents(name, prepared, documents)
    with ContainerdClient(address, namespace) as client:
        outcome = rpull(client, snapshotter, image)
    return {
        "name": name,
        "digest": image.target.digest,
        "manifest": image.manifest.digest,
        "architecture": prepared.architecture,
        "chain_id": image.chain_id,
        "layers": len(image.layers),
        "created": outcome.created,
        "healed": outcome.healed,
    }


def _check_packages() -> None:
    """Raises UnsupportedError, before anything is done, where gRPC is not installed."""
    try:
        for package in ("grpc", "google.protobuf"):
            import_module(package)
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"rpull: {error.name} is not installed; pip install 'lazy-snapshotter[containerd]'"
        ) from error


def _summary(document: dict[str, object]) -> str:
    said = f"{document['name']}  {document['digest']}  {document['layers']} layers"
    if document["healed"]:
        said += f"  ({document['healed']} lost snapshots were made anew)"
    return said
