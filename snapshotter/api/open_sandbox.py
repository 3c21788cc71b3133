"""An open sandbox: its process, its mount, and its commands. Blocking, thread-safe."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from snapshotter.api import copying
from snapshotter.api.cancelling import Cancellation
from snapshotter.api.command import Command, Completed, Streams, capture, check_status
from snapshotter.api.daemon import Daemon
from snapshotter.api.options import (
    CommandOptions,
    Name,
    ProgressCallback,
    RunOptions,
    SandboxOptions,
    Stream,
)
from snapshotter.api.paths_within import Owner
from snapshotter.errors import InvalidInputError, SnapshotterError, UnavailableError
from snapshotter.service import control
from snapshotter.service.sandbox import check
from snapshotter.service.sandbox_link import SandboxLink
from snapshotter.service.sandbox_spec import (
    Settings,
    Volume,
    check_settings,
    make_plan,
    make_surroundings,
    parse_volume,
)


class OpenSandbox:
    """One sandbox. ``make`` is called once, before anything else."""

    def __init__(
        self,
        daemon: Daemon,
        settings: Settings,
        link: SandboxLink,
        *,
        on_end: Callable[[OpenSandbox], None],
    ) -> None:
        """``on_end`` is told when it was closed."""
        self._daemon = daemon
        self._settings = settings
        self._link = link
        self._on_end = on_end
        self._lock = threading.Lock()
        self._root: int | None = None
        self._is_closed = False
        self._mounted: control.Mounted | None = None

    @property
    def mounted(self) -> control.Mounted:
        """The mount, the image, and why this view."""
        assert self._mounted is not None
        return self._mounted

    def make(
        self,
        request: control.Mount,
        on_progress: ProgressCallback | None,
        cancellation: Cancellation,
    ) -> None:
        """Asks for the view and makes it the root; when that fails, nothing stays."""
        request.owner_pid = self._link.pid
        with self._daemon.connect() as client:
            with cancellation.ended_by(client.interrupt):
                self._mounted, view = client.mount(request, on_progress=on_progress)
            record = self._mounted.mount
            try:
                self._enter(view, record)
                placed = control.Placed(id=record.id, target="/", pid=self._link.pid)
                client.ask(placed, control.Done)
                cancellation.check()
            except BaseException:
                self.close()
                raise

    def run(
        self, arguments: Sequence[Name], options: RunOptions, cancellation: Cancellation
    ) -> Completed[bytes]:
        """Runs a command to its end."""
        given = options.get("input")
        if given is not None and "stdin" in options:
            raise InvalidInputError("run: input and stdin are both given; choose one")
        raw = given.encode() if isinstance(given, str) else given or b""
        stdin = options.get("stdin", "null") if given is None else "pipe"
        if stdin == "pipe" and given is None:
            raise InvalidInputError("run: stdin is a pipe; give input instead, or use start")
        cancellation.check()
        command = self.start(arguments, options, stdin=stdin)
        done = capture(command, raw, options.get("timeout"), cancellation)
        if options.get("check", False):
            check_status(done)
        return done

    def start(
        self, arguments: Sequence[Name], options: CommandOptions, *, stdin: Stream | None = None
    ) -> Command:
        """Starts a command and does not wait for anything. ``stdin`` is over the options'."""
        plan = make_plan(
            self._command_settings(arguments, options),
            self.mounted.image.prepared,
            host_name=self._settings.hostname or self.mounted.mount.id,
            terminal=None,
        )
        with Streams(
            options.get("stdin", "null") if stdin is None else stdin,
            options.get("stdout", "pipe"),
            options.get("stderr", "pipe"),
        ) as streams:
            return Command(plan.arguments, self._link.run(plan, streams.theirs), streams.take())

    def read_file(self, path: Name) -> bytes:
        """The content of a file."""
        with self._open_root() as root:
            return copying.read_file(root, os.fspath(path))

    def write_file(self, path: Name, data: bytes, *, mode: int, owner: Owner) -> None:
        """Makes a file, and the directories to it."""
        with self._open_root() as root:
            copying.write_file(root, os.fspath(path), data, mode=mode, owner=owner)

    def copy_in(self, source: Name, target: Name, owner: Owner, cancellation: Cancellation) -> None:
        """Copies from the host."""
        with self._open_root() as root:
            names = (os.fspath(source), os.fspath(target))
            copying.copy_in(root, *names, owner=owner, cancellation=cancellation)

    def copy_out(self, source: Name, target: Name, cancellation: Cancellation) -> None:
        """Copies to the host."""
        with self._open_root() as root:
            names = (os.fspath(source), os.fspath(target))
            copying.copy_out(root, *names, cancellation=cancellation)

    def close(self) -> None:
        """Ends all commands, and the mount; done already is no error."""
        with self._lock:
            root, self._root = self._root, None
            is_closed, self._is_closed = self._is_closed, True
        if is_closed:
            return
        if root is not None:
            os.close(root)
        try:
            self._link.release()
        except SnapshotterError:
            pass  # its process is gone: then the view is, too
        try:  # before the process ends, which the daemon takes for the mount's end by itself
            self._daemon.tell_end(self.mounted.mount.id)
        finally:
            self._link.close()
            self._on_end(self)

    def _enter(self, view: int, record: control.MountRecord) -> None:
        """Makes the view the root of the sandbox's process; ``view`` is closed."""
        try:
            surroundings = make_surroundings(
                self._settings, host_name=record.id, read_only=record.read_only
            )
            staging = self._daemon.paths.run
            self._root = self._link.enter(view, surroundings, staging=staging)
        finally:
            os.close(view)

    @contextmanager
    def _open_root(self) -> Iterator[int]:
        """A descriptor of the root, for this block. Raises UnavailableError if it is closed.

        Of its own, so that closing the sandbox meanwhile is no other thread's descriptor closed.
        """
        with self._lock:
            if self._root is None:
                raise UnavailableError(f"sandbox {self.mounted.mount.id} is closed")
            root = os.dup(self._root)
        try:
            yield root
        finally:
            os.close(root)

    def _command_settings(self, arguments: Sequence[Name], options: CommandOptions) -> Settings:
        if isinstance(arguments, str | bytes):
            raise InvalidInputError(
                f'run {arguments!r}: give a list of arguments; for a shell: ["sh", "-c", "…"]'
            )
        own = self._settings
        words = [os.fspath(argument) for argument in arguments]
        settings = Settings(
            command=words,
            entrypoint="" if words else None,
            environment={**own.environment, **options.get("env", {})},
            user=options.get("user") or own.user,
            workdir=options.get("cwd") or own.workdir,
            hostname=own.hostname,
        )
        check_settings(settings)
        _check_strings(settings)
        return settings


def parse_settings(options: SandboxOptions) -> Settings:
    """The settings of a sandbox. Raises InvalidInputError and NotFoundError for bad ones."""
    volumes = (
        parse_volume(volume, os.getcwd()) if isinstance(volume, str) else _checked(volume)
        for volume in options.get("volumes", ())
    )
    settings = Settings(
        environment=dict(options.get("env", {})),
        volumes=list(volumes),
        user=options.get("user"),
        workdir=options.get("cwd"),
        hostname=options.get("hostname"),
    )
    check(settings)
    _check_strings(settings)
    return settings


def _checked(volume: Volume) -> Volume:
    """The volume with its source absolute; InvalidInputError for a target that cannot be."""
    mode = "ro" if volume.read_only else "rw"
    target = parse_volume(f"x:{volume.target}:{mode}", "/").target
    return Volume(os.path.abspath(volume.source), target, volume.read_only)


def _check_strings(settings: Settings) -> None:
    """What no program can be given: the kernel ends strings with NUL, names with an equals sign."""
    environment = settings.environment
    if any("\0" in word for word in (*settings.command, *environment, *environment.values())):
        raise InvalidInputError("run: an argument or variable has a NUL character in it")
    if any(not name or "=" in name for name in environment):
        raise InvalidInputError("run: a variable's name is empty or has an equals sign in it")
