"""Makes images ready: resolves them, ingests the layers that are missing, merges them.

One flight at a time for each request, each layer and each merge, whoever asks; an asker that
leaves does not end it. Lives on one event loop; ingest and merge run in threads.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
import structlog

from cache_server.blob_pipe import BlobPipe
from cache_server.flights import Flights
from cache_server.images import image_handle, is_merged, merged, of_chain, unmerged
from cache_server.ingest import ingest_layer
from cache_server.library import BlobDescriptor, Library, StoredImage
from cache_server.limits import IngestLimits
from cache_server.merge import merge_image
from cache_server.sources.manifest import ImageLayer
from cache_server.sources.reference import Reference, parse_reference
from cache_server.sources.source import Source
from snapshotter.cache_v1.protocol import Open, Prepare, Prepared, Progress
from snapshotter.errors import BusyError, InvalidInputError, NotFoundError

T = TypeVar("T")
OpenSource = Callable[[Reference, str | None], Source]
"""The source of a reference, with the credentials of an authfile where one is given."""

_ARCHITECTURE = re.compile(r"[a-z0-9]{1,32}(?:/[a-z0-9]{1,32})?")
_DEFAULT_LIMITS = IngestLimits()
log = structlog.get_logger(__name__)


class Preparation:
    """One prepare under way (or done): await ``task`` shielded, look at ``progress`` meanwhile."""

    def __init__(self) -> None:
        self.task: asyncio.Task[Prepared]
        self.phase = "resolve"
        self._layers: dict[str, tuple[BlobDescriptor, LayerProgress]] = {}

    @property
    def progress(self) -> Progress:
        """How far it is now. Bytes are of the blobs of all layers that were missing."""
        if self.phase != "download":
            return Progress(phase=self.phase)
        layers = self._layers
        total = sum(blob.size for blob, _ in layers.values())
        done = sum(progress.done_bytes for _, progress in layers.values())
        unfinished = (d for d, (blob, p) in layers.items() if p.done_bytes < blob.size)
        layer = next(unfinished, None)
        phase = "download" if layer is not None else "index"
        return Progress(phase=phase, layer=layer, done_bytes=done, total_bytes=total)

    def follow(self, blob: BlobDescriptor, progress: LayerProgress) -> None:
        """Counts a layer's download from now on."""
        # Replaced, not changed: connections' threads look at it at any time.
        self._layers = {**self._layers, blob.digest: (blob, progress)}
        self.phase = "download"


class LayerProgress:
    """How many bytes of a layer's blob have gone into ingest."""

    def __init__(self) -> None:
        self.pipe: BlobPipe | None = None

    @property
    def done_bytes(self) -> int:
        """Bytes so far; 0 while the layer waits its turn."""
        return self.pipe.taken_bytes if self.pipe else 0


class Preparer:
    """Prepares images into a library. ``aclose`` it before the library is closed."""

    def __init__(
        self,
        library: Library,
        open_source: OpenSource,
        *,
        workers: int = 2,
        queue: int = 16,
        parallel_layers: int = 3,
        limits: IngestLimits = _DEFAULT_LIMITS,
    ) -> None:
        self._library = library
        self._open_source = open_source
        self._limits = limits
        self._preparations: dict[tuple[object, ...], Preparation] = {}
        self._prepares: Flights[Prepared] = Flights()
        self._layers: Flights[None] = Flights()
        self._layer_progress: dict[str, LayerProgress] = {}
        self._merges: Flights[Prepared] = Flights()
        self._alone = asyncio.Lock()
        self._slots = asyncio.Semaphore(workers)
        self._layer_slots = asyncio.Semaphore(parallel_layers)
        self._room = workers + queue
        self._ingest_threads = ThreadPoolExecutor(parallel_layers, "ingest")
        self._merge_thread = ThreadPoolExecutor(1, "merge")

    def start(self, request: Prepare) -> Preparation:
        """Starts to prepare an image, or joins who already does.

        Raises InvalidInputError for a bad request. The task raises what resolve, ingest and merge
        do, and BusyError when too many images wait already.
        """
        reference = parse_reference(request.image)
        _check_architecture(request.architecture)
        if request.authfile is not None and not request.authfile.startswith("/"):
            raise InvalidInputError(f"authfile {request.authfile!r}: the path must be absolute")
        key = (
            reference,
            request.architecture,
            request.refresh,
            request.merge,
            request.authfile,
        )
        preparation = self._preparations.get(key)
        if preparation is None:
            preparation = self._preparations[key] = Preparation()
            run = self._prepare(preparation, reference, request)
            preparation.task = self._prepares.join(key, lambda: run)
            preparation.task.add_done_callback(lambda _: self._preparations.pop(key))
        return preparation

    async def open(self, request: Open) -> Prepared:
        """An image that was prepared before; waits only where its metadata image is to be made.

        Raises InvalidInputError, or NotFoundError for a handle or chain that is not known.
        """
        _check_architecture(request.architecture)
        if (request.handle is None) == (request.chain is None):
            raise InvalidInputError("open: give either a handle or a chain")
        if request.handle is not None:
            stored = self._library.find_image(request.handle)
            what = f"image {request.handle}"
        else:
            stored = self._library.find_chain(request.chain or "", request.architecture)
            what = f"chain {request.chain}"
        if stored is None or stored.prepared.architecture != request.architecture:
            raise NotFoundError(f"{what} for {request.architecture}: not prepared here")
        prepared = stored.prepared
        if request.chain is not None:
            chain = of_chain(prepared, request.chain)
            known = self._library.find_image(chain.image_handle)
            prepared = known.prepared if known else chain
        return await self._finished(prepared, merge=request.merge, documents=request.documents)

    async def run_alone(self, work: Callable[[], T]) -> T:
        """Runs ``work`` in a thread while nothing is added to the library; prepares that come
        meanwhile wait for it. BusyError if something is being prepared.
        """
        under_way = (self._prepares, self._layers, self._merges)
        if self._alone.locked() or not all(flights.is_empty for flights in under_way):
            raise BusyError("images are being prepared, or removed; try again when that is done")
        async with self._alone:
            return await asyncio.to_thread(work)

    async def aclose(self) -> None:
        """Gives up what is under way, and waits until its threads have ended."""
        for flights in (self._prepares, self._layers, self._merges):
            await flights.aclose()
        for threads in (self._ingest_threads, self._merge_thread):
            await asyncio.to_thread(threads.shutdown, cancel_futures=True)

    async def _prepare(
        self, preparation: Preparation, reference: Reference, request: Prepare
    ) -> Prepared:
        if not request.refresh:
            known = self._library.find_reference(str(reference), request.architecture)
            if known is not None:
                return await self._finished(known.prepared, merge=request.merge)
        if len(self._preparations) > self._room:
            raise BusyError(f"prepare {reference}: {self._room} images are being prepared")
        async with self._slots:
            await self._wait_for_turn()
            prepared = await self._ingested(preparation, reference, request)
            if request.merge:
                preparation.phase = "merge"
            return await self._finished(prepared, merge=request.merge)

    async def _ingested(
        self, preparation: Preparation, reference: Reference, request: Prepare
    ) -> Prepared:
        """Resolves an image and ingests its missing layers; its reference is known from then on."""
        started = time.monotonic()
        source = self._open_source(reference, request.authfile)
        image = await source.resolve(request.architecture)
        known = self._library.find_image(image_handle(image.digest, request.architecture))
        prepared = unmerged(image, request.architecture)
        if known is not None:  # its documents may be newer: another index with the same manifest
            prepared = msgspec.structs.replace(known.prepared, documents=prepared.documents)
        missing = {
            layer.diff_id: layer
            for layer in image.layers
            if self._library.layer(layer.diff_id) is None
        }
        await self._have_layers(preparation, source, missing.values())
        await self._save(prepared, str(reference))
        log.info(
            "image ingested",
            reference=str(reference),
            digest=image.digest,
            layers=len(image.layers),
            new_layers=len(missing),
            seconds=round(time.monotonic() - started, 3),
        )
        return prepared

    async def _have_layers(
        self, preparation: Preparation, source: Source, layers: Iterable[ImageLayer]
    ) -> None:
        """Ends with the first layer that fails; the others' downloads end by themselves."""
        waits = [
            asyncio.create_task(self._have_layer(preparation, source, layer)) for layer in layers
        ]
        try:
            await asyncio.gather(*waits)
        finally:
            for wait in waits:
                wait.cancel()

    async def _have_layer(
        self, preparation: Preparation, source: Source, layer: ImageLayer
    ) -> None:
        """Waits for whoever ingests the layer already and, if they fail, tries by itself: another
        prepare may have begun long ago, from a source or with credentials that are worse.
        """
        while (flight := self._layers.find(layer.diff_id)) is not None:
            preparation.follow(layer.blob, self._layer_progress[layer.diff_id])
            await asyncio.wait({flight})
            if flight.exception() is None:
                return
        progress = self._layer_progress[layer.diff_id] = LayerProgress()
        preparation.follow(layer.blob, progress)
        await asyncio.shield(
            self._layers.join(layer.diff_id, lambda: self._ingest(source, layer, progress))
        )

    async def _ingest(self, source: Source, layer: ImageLayer, progress: LayerProgress) -> None:
        try:
            async with self._layer_slots, source.open_blob(layer.blob) as pieces:
                progress.pipe = pipe = BlobPipe(f"layer {layer.blob.digest}")
                filler = asyncio.create_task(pipe.fill(pieces))
                try:
                    await asyncio.get_running_loop().run_in_executor(
                        self._ingest_threads, self._ingest_in_thread, pipe, layer
                    )
                finally:
                    pipe.close()
                    filler.cancel()
                    await asyncio.wait({filler})
        finally:
            del self._layer_progress[layer.diff_id]

    def _ingest_in_thread(self, pipe: BlobPipe, layer: ImageLayer) -> None:
        ingest_layer(
            self._library,
            pipe,
            descriptor=layer.blob,
            diff_id=layer.diff_id,
            limits=self._limits,
        )

    async def _finished(
        self, prepared: Prepared, *, merge: bool, documents: bool = False
    ) -> Prepared:
        """The answer as asked for: with a current metadata image or none, with documents or not."""
        if not merge:
            answer = msgspec.structs.replace(prepared, metadata_image=None)
        elif is_merged(prepared):
            answer = prepared
        else:
            answer = await asyncio.shield(
                self._merges.join(prepared.image_handle, lambda: self._merge(prepared))
            )
        return answer if documents else msgspec.structs.replace(answer, documents=None)

    async def _merge(self, prepared: Prepared) -> Prepared:
        await self._wait_for_turn()
        diff_ids = [layer.diff_id for layer in prepared.layers]
        name, totals = await asyncio.get_running_loop().run_in_executor(
            self._merge_thread, merge_image, self._library, diff_ids, self._limits
        )
        finished = merged(prepared, name, totals)
        await self._save(finished)
        return finished

    async def _wait_for_turn(self) -> None:
        async with self._alone:  # not held: what begins now keeps others from being alone
            pass

    async def _save(self, prepared: Prepared, *references: str) -> None:
        record = StoredImage(prepared=prepared, references=list(references), saved_at_s=time.time())
        await asyncio.to_thread(self._library.save_image, record)


def _check_architecture(architecture: str) -> None:
    if _ARCHITECTURE.fullmatch(architecture) is None:
        raise InvalidInputError(
            f"architecture {architecture[:80]!r}: write Go's name, such as amd64 or arm/v7"
        )
