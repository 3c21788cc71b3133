"""vm run, vm setup, vm initrd: an image in a virtual machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from snapshotter.authfiles import chosen_authfile
from snapshotter.cli import output
from snapshotter.cli.command_options import (
    CommandArgument,
    EntrypointOption,
    EnvironmentOption,
    RunCommand,
    UserOption,
    WorkdirOption,
)
from snapshotter.cli.images import AuthfileOption, ImageArgument, PlatformOption
from snapshotter.cli.session import Command, session_of
from snapshotter.service import control
from snapshotter.service.requesting import architecture_of, image_here

vm = typer.Typer(no_args_is_help=True, rich_markup_mode=None, add_completion=False)

KernelOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The guest's kernel. Default: what `vm setup` fetched, or a Debian cloud kernel of "
        "this host.",
        show_default=False,
    ),
]
ModulesOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Modules of --kernel (its lib/modules/RELEASE); none if all is built in.",
        show_default=False,
    ),
]
AssistOption = Annotated[
    bool,
    typer.Option(
        "--guest-assist",
        help="Let the guest's kernel (6.5 or newer) have the names itself: only contents come "
        "from the host.",
    ),
]
MachineOption = Annotated[
    str, typer.Option(metavar="NAME", help="microvm, q35, or auto for the fastest there is.")
]


@vm.command(cls=RunCommand)
def run(
    context: typer.Context,
    image: ImageArgument,
    command: CommandArgument = None,
    environment: EnvironmentOption = None,
    workdir: WorkdirOption = None,
    user: UserOption = None,
    entrypoint: EntrypointOption = None,
    hostname: Annotated[str | None, typer.Option(metavar="NAME", help="Default: guest.")] = None,
    platform: PlatformOption = None,
    authfile: AuthfileOption = None,
    upper: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep what the guest writes in this directory of the host. Default: thrown away.",
            show_default=False,
        ),
    ] = None,
    upper_disk: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --guest-assist: keep it on this ext4 disk, made if missing. Default: in "
            "the guest's memory.",
            show_default=False,
        ),
    ] = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="The guest cannot write to the image.")
    ] = False,
    guest_assist: AssistOption = False,
    kernel: KernelOption = None,
    kernel_modules: ModulesOption = None,
    initrd: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Made by `vm initrd`. Default: made as needed."),
    ] = None,
    memory: Annotated[int, typer.Option(metavar="MIB", help="The guest's memory.")] = 1024,
    cpus: Annotated[int, typer.Option(metavar="N", help="The guest's processors.")] = 1,
    accelerator: Annotated[
        str, typer.Option(metavar="NAME", help="kvm, tcg (emulation), or auto: KVM if it works.")
    ] = "auto",
    machine: MachineOption = "auto",
    console_log: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep the guest's kernel messages.", show_default=False),
    ] = None,
) -> None:
    """Run a command of an image in a virtual machine, whose root file system is the image.

    The guest has a kernel of its own and no network. Files come from the host when something
    reads them; what it writes is gone with it, unless an upper keeps it.

    \b
    snapshotter vm setup
    snapshotter vm run debian:12 -- uname -a
    snapshotter vm run --guest-assist python:3.12 -- python -m timeit
    snapshotter vm run --upper ./state debian:12 bash

    Exit status: the command's (128+n when signal n ended it); 125 when we failed, 126 when the
    command cannot be executed, 127 when it is not there.
    """
    from snapshotter.service import sandbox
    from snapshotter.service.sandbox_spec import Settings, parse_environment
    from snapshotter.vm import machines, running

    session = session_of(context)
    settings = Settings(
        command=command or (),
        entrypoint=entrypoint,
        environment=parse_environment(environment or (), os.environ),
        user=user,
        workdir=workdir,
        hostname=hostname,
    )
    options = running.GuestOptions(
        kernel=kernel,
        kernel_modules=kernel_modules,
        initrd=initrd,
        memory_mib=memory,
        processors=cpus,
        accelerator=machines.accelerator_choice(accelerator),
        machine=machines.machine_choice(machine),
        assist=guest_assist,
        read_only=read_only,
        upper=upper,
        upper_disk=upper_disk,
        console_log=console_log,
    )
    sandbox.check(settings)
    running.check(options)
    request = control.Pull(
        image=image_here(image),
        architecture=architecture_of(platform),
        refresh=False,
        authfile=chosen_authfile(authfile),
    )
    with session.connect() as client, output.pull_progress(quiet=session.json) as progress:
        record = client.ask(request, control.Image, on_progress=progress).image
    sys.exit(running.run(session.paths, request.image, record, settings, options))


@vm.command(cls=Command)
def setup(context: typer.Context) -> None:
    """Fetch Debian's cloud kernel for guests, by apt and without installing anything.

    About 35 MB from the Debian archive; checked by apt as any package.

    \b
    snapshotter vm setup
    """
    from snapshotter.vm import debian_kernel
    from snapshotter.vm.facts import KERNELS

    session = session_of(context)
    path = debian_kernel.fetch(session.paths.guests / KERNELS)
    session.write(
        {"kernel": str(path / "vmlinuz"), "modules": str(path / "modules")},
        lambda: print(f"guest kernel {path.name} in {path}"),
    )


@vm.command(cls=Command)
def initrd(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it.")],
    kernel: KernelOption = None,
    kernel_modules: ModulesOption = None,
    guest_assist: AssistOption = False,
    machine: MachineOption = "auto",
) -> None:
    """Write the initramfs that guests start with, to be read or to be used again.

    \b
    snapshotter vm initrd ./guest.img
    snapshotter vm run --initrd ./guest.img debian:12 -- true
    """
    from snapshotter.vm import machines, running

    session = session_of(context)
    options = running.GuestOptions(
        kernel=kernel,
        kernel_modules=kernel_modules,
        assist=guest_assist,
        machine=machines.machine_choice(machine),
    )
    archive = running.initramfs_for(session.paths, options)
    file.write_bytes(archive)
    session.write(
        {"file": str(file), "bytes": len(archive)}, lambda: print(f"{file}: {len(archive)} bytes")
    )
