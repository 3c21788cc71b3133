"""Removing images, and content that none needs: by the server that runs on a root, else here."""

from __future__ import annotations

from pathlib import Path

from cache_server.importing import connect, receive
from cache_server.library import Library
from cache_server.records import StoredImage
from cache_server.root_lock import RootInUseError, RootLock
from cache_server.sources.reference import parse_reference
from snapshotter.cache_v1 import protocol
from snapshotter.cache_v1.protocol import Collect, Collected, Remove, Removed
from snapshotter.errors import InvalidInputError, NotFoundError, SnapshotterError, UnavailableError
from snapshotter.framing import FrameDecoder, encode_frame


def tend(root: Path, request: Remove | Collect, *, token: str | None = None) -> Removed | Collected:
    """Carries out a request on ``root``; blocks until it is done.

    Raises NotFoundError for an image that is not there, InvalidInputError for a name of several,
    BusyError while images are being prepared, UnavailableError if a server does not answer.
    """
    try:
        with RootLock(root), Library(root) as library:
            if isinstance(request, Remove):
                return remove_image(library, request)
            return library.collect_garbage(dry_run=request.dry_run)
    except RootInUseError as busy:
        if busy.holder is None or busy.holder.socket is None:
            raise
        return _ask(busy.holder.socket, request, token)


def _ask(path: str, request: Remove | Collect, token: str | None) -> Removed | Collected:
    """Waits for as long as it takes: reading every layer's list may be a matter of minutes."""
    try:
        with connect(path) as connection:
            connection.sendall(encode_frame(protocol.encode_request(request, token=token)))
            answer = receive(connection, FrameDecoder())
    except OSError as error:
        raise UnavailableError(f"server on {path}: {error}") from error
    if not isinstance(answer, Removed | Collected):
        raise SnapshotterError(f"server on {path}: unexpected answer {type(answer).__name__}")
    return answer


def remove_image(library: Library, request: Remove) -> Removed:
    """Removes what ``request`` names, unless it is a dry run."""
    name = _full_name(request.image)
    image = _find(library, name, request)
    is_name = name in image.references and len(image.references) > 1
    if not request.dry_run:
        library.remove_image(image, name)
    return Removed(
        handle=image.handle, names=[name] if is_name else image.references, whole=not is_name
    )


def _full_name(image: str) -> str:
    """A reference as it is recorded; digests and handles, which are none, as they are."""
    if image.startswith("sha256:"):
        return image
    return str(parse_reference(image))


def _find(library: Library, name: str, request: Remove) -> StoredImage:
    found = [
        image
        for image in library.images()
        if name in (*image.references, image.handle, image.prepared.digest)
        and request.architecture in (None, image.prepared.architecture)
    ]
    if not found:
        raise NotFoundError(f"remove image {name}: there is none; cache-server images lists them")
    if len(found) > 1:
        architectures = ", ".join(sorted(image.prepared.architecture for image in found))
        raise InvalidInputError(
            f"remove image {name}: it is there for {architectures}; choose one by --platform"
        )
    return found[0]
