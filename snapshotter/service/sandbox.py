"""Runs a command in a view, as a plain container without an engine.

The sandbox has mount, pid, uts and ipc namespaces of its own and the host's network. The view is
mounted in its mount namespace alone, so that nothing stays mounted however it ends: with the
command, with Ctrl-C, or with SIGKILL of this process (the kernel then kills the sandbox's first
process, and with it all others).

Three processes take part: this one, which passes signals on and lends the terminal
(sandbox_supervisor); the first process, which reaps (sandbox_init); and the command.
"""

from __future__ import annotations

import os
from pathlib import Path

from snapshotter.errors import SandboxError, UnavailableError
from snapshotter.service import control
from snapshotter.service.control_client import ControlClient
from snapshotter.service.sandbox_spec import (
    Settings,
    check_settings,
    check_sources,
    make_plan,
    make_surroundings,
)
from snapshotter.service.sandbox_supervisor import Sandbox

__all__ = ["SandboxError", "check", "run"]


def check(settings: Settings) -> None:
    """Raises InvalidInputError or NotFoundError for settings that can never work.

    To be called before the view is made, so that bad input changes nothing.
    """
    check_settings(settings)
    check_sources(settings.volumes)


def run(
    client: ControlClient,
    mounted: control.Mounted,
    view: int,
    settings: Settings,
    *,
    staging: Path,
) -> int:
    """Runs one command in a view that was just made; its exit status (128+n for signal n).

    The view's descriptor is closed and its mount ended, whatever happens. ``staging`` is an
    existing directory of the host; only the sandbox sees something mounted there, for a moment.
    This process must have no other thread: signals would go to that instead of to the command.
    Raises SandboxError when the command could not be started, and what ``make_plan`` raises.
    """
    record = mounted.mount
    try:
        try:
            terminal = os.environ.get("TERM", "xterm") if os.isatty(0) else None
            image = mounted.image.prepared
            plan = make_plan(settings, image, host_name=record.id, terminal=terminal)
            surroundings = make_surroundings(
                settings,
                host_name=record.id,
                read_only=record.read_only,
                has_terminal=terminal is not None,
            )
            sandbox = Sandbox.start(plan, view, surroundings, staging=staging)
        finally:
            os.close(view)
        return sandbox.supervise(lambda pid: _tell_placed(client, record.id, pid))
    finally:
        _tell(client, control.Unmounted(id=record.id))


def _tell_placed(client: ControlClient, mount_id: str, pid: int) -> None:
    _tell(client, control.Placed(id=mount_id, target="/", pid=pid))


def _tell(client: ControlClient, request: control.Request) -> None:
    try:
        client.ask(request, control.Done)
    except UnavailableError:
        pass  # a daemon that was restarted meanwhile finds out by itself, from the owner's end
