"""Many sandboxes at once, each with a time limit, under asyncio or trio.

    python examples/async_sandboxes.py IMAGE [--count 20] [--at-once 4] [--loop trio] [--root DIR]

Every task gets a file, runs a command whose output is read while it comes, and hands back a file.
One more never ends by itself: it is cancelled when the others are done, and nothing of it is left.
Needs root.
"""

import argparse
import tempfile
from pathlib import Path

import anyio

from snapshotter import api
from snapshotter.api import aio

TASK = """
import sys
lines = open("/task/input").readlines()
for number, line in enumerate(lines, 1):
    print(f"line {number} of {len(lines)}", flush=True)
open("/task/output", "w").writelines(reversed(lines))
while sys.argv[1] == "forever":
    pass
"""


def main() -> None:
    """Reads the options and starts the event loop."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("image", help="with python3 in it; spelled as for `snapshotter run`")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--limit", type=float, default=60.0, help="of each task, in seconds")
    parser.add_argument("--loop", choices=["asyncio", "trio"], default="asyncio")
    parser.add_argument("--root", help="of the snapshotter; default: the system's")
    options = parser.parse_args()
    anyio.run(run_all, options, backend=options.loop)


async def run_all(options: argparse.Namespace) -> None:
    """Runs all tasks, a few at a time."""
    slots = anyio.Semaphore(options.at_once)

    async def run_limited(name: str) -> None:
        async with slots:
            with anyio.move_on_after(options.limit) as limit:
                await run_task(client, image, name)
            if limit.cancelled_caught:
                print(f"{name}: ended after {options.limit:g} s")

    async with aio.connect(root=options.root) as client:
        image = await client.pull(options.image)
        async with anyio.create_task_group() as endless:
            endless.start_soon(run_task, client, image, "forever")
            async with anyio.create_task_group() as group:
                for number in range(options.count):
                    group.start_soon(run_limited, f"task {number}")
            endless.cancel_scope.cancel()
        print(f"{len(await client.mounts())} sandboxes are left")


async def run_task(client: aio.Client, image: api.ImageRecord, name: str) -> None:
    """One task in a sandbox of its own; cancelling it ends everything."""
    with tempfile.TemporaryDirectory() as directory:
        given, result = Path(directory, "given"), Path(directory, "result")
        await anyio.Path(given).write_text(f"first of {name}\nsecond of {name}\n")
        async with client.sandbox(image) as box:
            await box.copy_in(given, "/task/input")
            async with box.start(["python3", "-c", TASK, name]) as process:
                assert process.stdout is not None
                async for output in process.stdout:  # a piece, of one line or several
                    for line in output.decode().splitlines():
                        print(f"{name}: {line}")
                status = await process.wait()
            await box.copy_out("/task/output", result)
        lines = (await anyio.Path(result).read_text()).splitlines()
        print(f"{name}: exit status {status}, {lines[0]!r} comes first now")


if __name__ == "__main__":
    main()
