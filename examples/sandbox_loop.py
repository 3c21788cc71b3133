"""A sandbox for each task, one after the other: twenty uppers of one image.

    python examples/sandbox_loop.py IMAGE WORK [--count 20] [--root DIR]

Each sandbox runs a few lines of Python, which write to its own upper, WORK/task-NN. What a task
wrote is kept there; at the end one of the uppers is opened again. Needs root.
"""

import argparse
import time
from pathlib import Path

from snapshotter import api

TASK = """
import json, os, pathlib
number = int(os.environ["TASK"])
pathlib.Path("/result.json").write_text(json.dumps({"task": number, "square": number ** 2}))
"""


def main() -> None:
    """Runs the loop and prints what each sandbox took, and what was fetched."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("image", help="with python3 in it; spelled as for `snapshotter run`")
    parser.add_argument("work", type=Path, help="where the uppers are kept")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--root", help="of the snapshotter; default: the system's")
    options = parser.parse_args()
    with api.connect(root=options.root) as client:
        image = client.pull(options.image)
        fetched = fetched_bytes(client)
        for number in range(options.count):
            began = time.monotonic()
            run_task(client, image, options.work / f"task-{number:02}", number)
            now = fetched_bytes(client)
            took_ms = (time.monotonic() - began) * 1e3
            print(f"task {number:2}: {took_ms:6.1f} ms, {now - fetched:10,} bytes fetched")
            fetched = now
        with client.sandbox(image, upper=options.work / "task-03") as box:
            print("task 3 left", box.read_file("/result.json").decode())


def run_task(client: api.Client, image: api.ImageRecord, upper: Path, number: int) -> None:
    """One task in a sandbox of its own."""
    with client.sandbox(image, upper=upper, volatile=True) as box:
        box.run(["python3", "-c", TASK], env={"TASK": str(number)}, timeout=60, check=True)


def fetched_bytes(client: api.Client) -> int:
    """What came from the cache server since the snapshotter was started."""
    return client.status().counters.get("fetched_bytes", 0)


if __name__ == "__main__":
    main()
