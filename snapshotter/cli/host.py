"""daemon start, stop and status; doctor."""

from __future__ import annotations

import typer

from snapshotter.cli import output
from snapshotter.cli.session import Command, Session, session_of
from snapshotter.errors import UnavailableError, UnsupportedError
from snapshotter.service import control
from snapshotter.service.control_client import ControlClient

daemon = typer.Typer(no_args_is_help=True, rich_markup_mode=None, add_completion=False)


@daemon.command(cls=Command)
def start(context: typer.Context) -> None:
    """Start the daemon, if it is not running; every other command does so too.

    \b
    snapshotter daemon start
    snapshotter --root /data/snapshotter daemon start
    """
    session = session_of(context)
    with session.connect() as client:
        running = client.ask(control.Status(), control.Running)
    session.write(
        running, lambda: print(f"daemon {running.pid} runs, socket {session.paths.control_socket}")
    )


@daemon.command(cls=Command)
def stop(context: typer.Context) -> None:
    """Stop the daemon. What is mounted goes on working; with nothing mounted, all of it ends.

    \b
    snapshotter daemon stop
    """
    from snapshotter.service.daemon_process import STOP_TIMEOUT_S, wait_for_end

    session = session_of(context)
    try:
        client = ControlClient(session.paths.control_socket)
    except UnavailableError:
        session.write({"stopped": False}, lambda: print("the daemon is not running"))
        return
    with client:
        pid = client.ask(control.Status(), control.Running).pid
        client.ask(control.Stop(), control.Done)
    if not wait_for_end(pid):
        raise UnavailableError(
            f"stop the daemon: process {pid} still runs after {STOP_TIMEOUT_S:.0f} s; "
            f"see {session.paths.log('daemon')}"
        )
    session.write({"stopped": True}, lambda: print(f"daemon {pid} stopped"))


@daemon.command(cls=Command)
def status(context: typer.Context) -> None:
    """Show the daemon, its processes and its counters; exit status 5 when it is not running.

    \b
    snapshotter daemon status --json
    """
    session = session_of(context)
    with ControlClient(session.paths.control_socket) as client:
        running = client.ask(control.Status(), control.Running)
    session.write(running, lambda: _describe(running))


def doctor(context: typer.Context) -> None:
    """Say what this host can do, and how to mend what it cannot.

    Exit status 8 when no view works here.

    \b
    snapshotter doctor
    """
    from snapshotter.containerd.setting_up import diagnose
    from snapshotter.vm.facts import guest_facts

    session = session_of(context)
    with session.connect() as client:
        found = client.ask(control.Facts(), control.HostFacts)
    found.facts += guest_facts(session.paths.guests)
    containerd = diagnose(session.paths.containerd_socket)
    session.write(
        {"views": found.views, "facts": found.facts, "containerd": containerd},
        lambda: _print_facts(session, found, containerd),
    )
    if not any(view.ok for view in found.views):
        raise UnsupportedError("doctor: no view works on this host")


def _describe(running: control.Running) -> None:
    processes = [
        (f"Process {name}", "not up" if pid is None else str(pid))
        for name, pid in running.processes.items()
    ]
    counters = [(name, str(total)) for name, total in running.counters.items()]
    output.print_fields(
        [
            ("Version", running.version),
            ("Pid", str(running.pid)),
            ("Root", running.root),
            ("Run", running.run),
            *processes,
            *counters,
        ]
    )


def _print_facts(
    session: Session, found: control.HostFacts, containerd: list[control.Fact]
) -> None:
    print(f"root {session.paths.root}")
    parts = (("views", found.views), ("host", found.facts), ("containerd", containerd))
    for title, facts in parts:
        print(f"{title}:")
        for fact in facts:
            print(f"  {'ok' if fact.ok else 'NO':<3} {fact.name}: {fact.detail}")
            if fact.remedy and not fact.ok:
                print(f"      {fact.remedy}")
