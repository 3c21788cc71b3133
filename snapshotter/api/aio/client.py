"""Client, Mount and Sandbox for asyncio and trio: what the synchronous half does, in threads."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Literal, TypeVar, Unpack, overload

import msgspec

from snapshotter.api.aio.process import Process
from snapshotter.api.aio.work import in_thread, relayed, to_its_end
from snapshotter.api.command import Completed, as_text
from snapshotter.api.core import Core
from snapshotter.api.daemon import image_name
from snapshotter.api.open_mount import OpenMount
from snapshotter.api.open_sandbox import OpenSandbox
from snapshotter.api.options import (
    CommandOptions,
    ImageName,
    MountOptions,
    Name,
    PullOptions,
    RunOptions,
    SandboxOptions,
)
from snapshotter.api.paths_within import Owner
from snapshotter.service import control
from snapshotter.store.images import ImageRecord

Answer = TypeVar("Answer", bound=msgspec.Struct)


@asynccontextmanager
async def connect(
    *, root: Name | None = None, run: Name | None = None, config: Name | None = None
) -> AsyncIterator[Client]:
    """The snapshotter of this host, for a block; see ``snapshotter.api.connect``.

    At the end it closes sandboxes and mounts that are still open, except mounts on directories of
    yours.
    """
    core = Core(root, run, config)
    await in_thread(lambda _: core.connect())
    try:
        yield Client(core)
    finally:
        await to_its_end(core.close)


class Client:
    """The snapshotter of this host; made by ``connect``.

    Methods raise what those of ``snapshotter.api.Client`` raise.
    """

    def __init__(self, core: Core) -> None:
        self._core = core

    async def pull(
        self, image: str, *, refresh: bool = True, **options: Unpack[PullOptions]
    ) -> ImageRecord:
        """Makes an image known here, by its names and metadata; content comes when it is read."""
        asked = relayed(options)
        return await in_thread(
            lambda cancellation: self._core.pull(
                image, refresh=refresh, options=asked, cancellation=cancellation
            )
        )

    async def images(self) -> list[ImageRecord]:
        """The images that were pulled."""
        return (await self._ask(control.ListImages(), control.Images)).images

    async def inspect(self, image: ImageName) -> ImageRecord:
        """One pulled image, by reference, handle, digest or number; or raises NotFoundError."""
        return (await self._ask(control.Inspect(image=image_name(image)), control.Image)).image

    async def mounts(self) -> list[control.MountRecord]:
        """The mounts that stand, sandboxes' too."""
        return (await self._ask(control.ListMounts(), control.Mounts)).mounts

    async def status(self) -> control.Running:
        """What the daemon and its processes are doing: pids and counters."""
        return await self._ask(control.Status(), control.Running)

    @asynccontextmanager
    async def mount(
        self, image: ImageName, directory: Name | None = None, **options: Unpack[MountOptions]
    ) -> AsyncIterator[Mount]:
        """Mounts an image for the length of an ``async with`` block.

        When the block ends by an exception, a mount that is still in use is detached; otherwise
        that raises BusyError and leaves it standing.
        """
        make = functools.partial(self._core.mount, image, directory, relayed(options))
        mount = await in_thread(make, undo=OpenMount.close)
        try:
            yield Mount(mount)
        except BaseException:
            await to_its_end(mount.close)
            raise
        await to_its_end(lambda: mount.remove(lazy=False))

    async def unmount(self, name: Name, *, lazy: bool = False) -> None:
        """Unmounts by directory or id; ``lazy`` detaches a mount in use, whose users can finish."""
        await to_its_end(lambda: self._core.unmount(name, lazy=lazy))

    @asynccontextmanager
    async def sandbox(
        self, image: ImageName, **options: Unpack[SandboxOptions]
    ) -> AsyncIterator[Sandbox]:
        """Opens a sandbox over an image for the length of an ``async with`` block."""
        make = functools.partial(self._core.open_sandbox, image, relayed(options))
        sandbox = await in_thread(make, undo=OpenSandbox.close)
        try:
            yield Sandbox(sandbox)
        finally:
            await to_its_end(sandbox.close)

    async def _ask(self, request: control.Request, answer: type[Answer]) -> Answer:
        return await in_thread(
            lambda cancellation: self._core.daemon.ask(request, answer, cancellation=cancellation)
        )


class Mount:
    """A view of an image on a directory; usable as the path of that. Made by ``Client.mount``."""

    def __init__(self, mount: OpenMount) -> None:
        self._mount = mount

    def __fspath__(self) -> str:
        return self._mount.path

    @property
    def path(self) -> str:
        """Where it stands."""
        return self._mount.path

    @property
    def record(self) -> control.MountRecord:
        """Its id, view and upper."""
        return self._mount.mounted.mount

    @property
    def image(self) -> ImageRecord:
        """The image."""
        return self._mount.mounted.image


class Sandbox:
    """A root of its own for commands; see ``snapshotter.api.Sandbox``. Made by ``Client.sandbox``.

    A command whose ``run`` is cancelled is killed with all it started.
    """

    def __init__(self, sandbox: OpenSandbox) -> None:
        self._sandbox = sandbox

    @property
    def record(self) -> control.MountRecord:
        """The sandbox's mount: its id, view and upper."""
        return self._sandbox.mounted.mount

    @property
    def image(self) -> ImageRecord:
        """The image."""
        return self._sandbox.mounted.image

    @overload
    async def run(
        self,
        arguments: Sequence[Name] = (),
        *,
        text: Literal[False] = False,
        **options: Unpack[RunOptions],
    ) -> Completed[bytes]: ...

    @overload
    async def run(
        self, arguments: Sequence[Name] = (), *, text: Literal[True], **options: Unpack[RunOptions]
    ) -> Completed[str]: ...

    async def run(
        self, arguments: Sequence[Name] = (), *, text: bool = False, **options: Unpack[RunOptions]
    ) -> Completed[bytes] | Completed[str]:
        """Runs a command to its end; what it wrote to pipes is in the result."""
        done = await in_thread(functools.partial(self._sandbox.run, arguments, options))
        return as_text(done) if text else done

    @asynccontextmanager
    async def start(
        self, arguments: Sequence[Name] = (), **options: Unpack[CommandOptions]
    ) -> AsyncIterator[Process]:
        """Starts a command for the length of an ``async with`` block, which kills it at its end."""
        process = Process(self._sandbox.start(arguments, options))
        try:
            await process.await_start()
            yield process
        finally:
            await process.aclose()

    async def read_file(self, path: Name) -> bytes:
        """The content of a file."""
        return await in_thread(lambda _: self._sandbox.read_file(path))

    async def write_file(
        self, path: Name, data: bytes, *, mode: int = 0o644, uid: int = 0, gid: int = 0
    ) -> None:
        """Makes a file, and the directories to it."""
        owner = Owner(uid, gid)
        await in_thread(lambda _: self._sandbox.write_file(path, data, mode=mode, owner=owner))

    async def copy_in(self, source: Name, target: Name, *, uid: int = 0, gid: int = 0) -> None:
        """Copies a file or directory of the host to ``target``, the name of the copy itself."""
        await in_thread(functools.partial(self._sandbox.copy_in, source, target, Owner(uid, gid)))

    async def copy_out(self, source: Name, target: Name) -> None:
        """Copies a file or directory to ``target`` on the host, the name of the copy itself."""
        await in_thread(functools.partial(self._sandbox.copy_out, source, target))
