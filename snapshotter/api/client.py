"""The synchronous half: Client, Mount, Sandbox, Process. All but Process thread-safe."""

from __future__ import annotations

import io
from collections.abc import Sequence
from types import TracebackType
from typing import Literal, Self, TypeVar, Unpack, overload

import msgspec

from snapshotter.api.cancelling import Cancellation
from snapshotter.api.command import Command, Completed, as_text
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
from snapshotter.errors import CommandTimeoutError
from snapshotter.service import control
from snapshotter.store.images import ImageRecord

Answer = TypeVar("Answer", bound=msgspec.Struct)


def connect(
    *, root: Name | None = None, run: Name | None = None, config: Name | None = None
) -> Client:
    """The snapshotter of this host; its daemon is started if it is not running.

    ``root``, ``run`` and ``config`` are as on the command line; so are their defaults. Raises
    UnavailableError when the daemon cannot be started, AccessDeniedError for its run directory.
    """
    core = Core(root, run, config)
    core.connect()
    return Client(core)


class Client:
    """The snapshotter of this host; made by ``connect``.

    As a context manager it closes, at the end, sandboxes that are still open and mounts on
    directories of their own. Every method raises UnavailableError when the daemon cannot be
    reached or started.
    """

    def __init__(self, core: Core) -> None:
        self._core = core

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes what is still open. Mounts on directories of yours stay."""
        self._core.close()

    def pull(
        self, image: str, *, refresh: bool = True, **options: Unpack[PullOptions]
    ) -> ImageRecord:
        """Makes an image known here, by its names and metadata; content comes when it is read.

        ``refresh`` asks the registry what a tag means now; without, a known image is taken as it
        is. Raises NotFoundError, AccessDeniedError, CorruptError or UnavailableError.
        """
        return self._core.pull(image, refresh=refresh, options=options, cancellation=Cancellation())

    def images(self) -> list[ImageRecord]:
        """The images that were pulled."""
        return self._ask(control.ListImages(), control.Images).images

    def inspect(self, image: ImageName) -> ImageRecord:
        """One pulled image, by reference, handle, digest or number; or raises NotFoundError."""
        return self._ask(control.Inspect(image=image_name(image)), control.Image).image

    def mounts(self) -> list[control.MountRecord]:
        """The mounts that stand, sandboxes' too."""
        return self._ask(control.ListMounts(), control.Mounts).mounts

    def status(self) -> control.Running:
        """What the daemon and its processes are doing: pids and counters."""
        return self._ask(control.Status(), control.Running)

    def mount(
        self, image: ImageName, directory: Name | None = None, **options: Unpack[MountOptions]
    ) -> Mount:
        """Mounts an image, pulling it first when it is not known.

        ``directory`` must exist; by default a new one is made, which goes with the mount. The
        mount stands until it is unmounted, also beyond the end of this program; a ``with`` block
        unmounts it at its end. Raises what ``pull`` raises, NotFoundError or InvalidInputError for
        the directory, BusyError for an upper in use and UnsupportedError for a view that this host
        cannot make.
        """
        return Mount(self._core.mount(image, directory, options, Cancellation()))

    def unmount(self, name: Name, *, lazy: bool = False) -> None:
        """Unmounts by directory or id; ``lazy`` detaches a mount in use, whose users can finish.

        Raises BusyError, which names the users, and NotFoundError.
        """
        self._core.unmount(name, lazy=lazy)

    def sandbox(self, image: ImageName, **options: Unpack[SandboxOptions]) -> Sandbox:
        """Opens a sandbox over an image, pulling it first when it is not known.

        Raises what ``mount`` raises, and SandboxError when its root cannot be made.
        """
        return Sandbox(self._core.open_sandbox(image, options, Cancellation()))

    def _ask(self, request: control.Request, answer: type[Answer]) -> Answer:
        return self._core.daemon.ask(request, answer, cancellation=Cancellation())


class Mount:
    """A view of an image on a directory; usable as the path of that. Made by ``Client.mount``.

    A ``with`` block unmounts it at its end. When the block ends by an exception, a mount that is
    still in use is detached; otherwise that raises BusyError and leaves it standing.
    """

    def __init__(self, mount: OpenMount) -> None:
        self._mount = mount

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.unmount(lazy=kind is not None)

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

    def unmount(self, *, lazy: bool = False) -> None:
        """Unmounts it; ``lazy`` detaches it even if it is in use. Done already is no error.

        Raises BusyError, which names the users.
        """
        self._mount.remove(lazy=lazy)


class Sandbox:
    """A root of its own for commands: a view of an image, with a writable upper.

    Commands share the root, ``/dev/shm``, hostname and IPC; each has processes of its own, which
    end with it. The network is the host's. Made by ``Client.sandbox``; to be closed, best by
    ``with``.
    """

    def __init__(self, sandbox: OpenSandbox) -> None:
        self._sandbox = sandbox

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills what runs and removes the mount; a private upper goes with it."""
        self._sandbox.close()

    @property
    def record(self) -> control.MountRecord:
        """The sandbox's mount: its id, view and upper."""
        return self._sandbox.mounted.mount

    @property
    def image(self) -> ImageRecord:
        """The image."""
        return self._sandbox.mounted.image

    @overload
    def run(
        self,
        arguments: Sequence[Name] = (),
        *,
        text: Literal[False] = False,
        **options: Unpack[RunOptions],
    ) -> Completed[bytes]: ...

    @overload
    def run(
        self, arguments: Sequence[Name] = (), *, text: Literal[True], **options: Unpack[RunOptions]
    ) -> Completed[str]: ...

    def run(
        self, arguments: Sequence[Name] = (), *, text: bool = False, **options: Unpack[RunOptions]
    ) -> Completed[bytes] | Completed[str]:
        """Runs a command to its end; what it wrote to pipes is in the result.

        Without ``arguments`` the image's own command is run. ``text`` has the output as UTF-8
        text, not as bytes. What the command left running ends with it. Raises SandboxError when
        it cannot be run, CommandTimeoutError when it was killed after ``timeout``,
        CommandFailedError for another status than 0 if ``check``, InvalidInputError for options
        that make no sense, and UnavailableError for a closed sandbox.
        """
        done = self._sandbox.run(arguments, options, Cancellation())
        return as_text(done) if text else done

    def start(self, arguments: Sequence[Name] = (), **options: Unpack[CommandOptions]) -> Process:
        """Starts a command, to stream its output or to leave it running beside others.

        Raises SandboxError when its user or directory cannot be had; that the program is not there
        is told by the process's ``wait``. Raises UnavailableError for a closed sandbox.
        """
        process = Process(self._sandbox.start(arguments, options))
        try:
            process.await_start()
        except BaseException:
            process.close()
            raise
        return process

    def read_file(self, path: Name) -> bytes:
        """The content of a file. Raises as ``copy_out`` does."""
        return self._sandbox.read_file(path)

    def write_file(
        self, path: Name, data: bytes, *, mode: int = 0o644, uid: int = 0, gid: int = 0
    ) -> None:
        """Makes a file, and the directories to it. Raises as ``copy_in`` does."""
        self._sandbox.write_file(path, data, mode=mode, owner=Owner(uid, gid))

    def copy_in(self, source: Name, target: Name, *, uid: int = 0, gid: int = 0) -> None:
        """Copies a file or directory of the host to ``target``, the name of the copy itself.

        Directories to it are made; files that are there are replaced, directories merged. Modes,
        times, links, holes, users' extended attributes and ACLs are kept; set-id bits and
        capabilities are not. Links in the sandbox never lead out of it. Raises NotFoundError,
        AccessDeniedError, InvalidInputError for devices and sockets, DiskFullError, and
        SnapshotterError for whatever else the kernel refuses.
        """
        self._sandbox.copy_in(source, target, Owner(uid, gid), Cancellation())

    def copy_out(self, source: Name, target: Name) -> None:
        """Copies a file or directory to ``target`` on the host, the name of the copy itself.

        As ``copy_in``, but the parent of ``target`` must exist and copies belong to this program's
        user. Links are copied as links: do not follow those in a copy of what you do not trust.
        """
        self._sandbox.copy_out(source, target, Cancellation())


class Process:
    """A command that was started in a sandbox. Leaving its ``with`` block kills it.

    ``stdin``, ``stdout`` and ``stderr`` are binary files where pipes were asked for, else None.
    """

    def __init__(self, command: Command) -> None:
        self._command = command
        stdin, stdout, stderr = command.streams
        self.stdin = None if stdin is None else io.FileIO(stdin, "w")
        self.stdout = None if stdout is None else io.BufferedReader(io.FileIO(stdout))
        self.stderr = None if stderr is None else io.BufferedReader(io.FileIO(stderr))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The command's pid on the host."""
        return self._command.pid

    def await_start(self) -> None:
        """Waits until the command is there. Raises SandboxError when it can never be."""
        self._command.wait_decided()

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end; the exit status (128+n for signal n). ``timeout`` is in seconds.

        Raises SandboxError when the program is not there or cannot be executed, and
        CommandTimeoutError when it goes on after ``timeout``: it is not killed for that.
        """
        if not self._command.wait_end(timeout):
            raise CommandTimeoutError(
                f"wait for {self._command.arguments[0]}: it goes on after {timeout:g} s"
            )
        return self._command.exit_status()

    def send_signal(self, number: int) -> None:
        """Signals the command itself; one that has ended is left alone."""
        self._command.reports.send_signal(number)

    def kill(self) -> None:
        """Ends the command and all it started, and waits for that."""
        self._command.kill()

    def close(self) -> None:
        """Kills what still runs, and closes the pipes."""
        try:
            self._command.kill()
        finally:
            self._command.reports.close()
            for file in (self.stdin, self.stdout, self.stderr):
                if file is not None:
                    file.close()
