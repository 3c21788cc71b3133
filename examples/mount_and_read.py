"""Mounts an image for a moment, looks around, and tells how little was fetched for that.

    python examples/mount_and_read.py IMAGE [FILE] [--root DIR]

Names, sizes and modes of all files are there at once; a file's content comes when it is opened.
Needs root.
"""

import argparse
import os
from pathlib import Path

from snapshotter import api


def main() -> None:
    """Mounts the image and prints what it finds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("image", help="spelled as for `snapshotter run`")
    parser.add_argument("file", nargs="?", default="/etc/os-release", help="to be shown")
    parser.add_argument("--root", help="of the snapshotter; default: the system's")
    options = parser.parse_args()
    with api.connect(root=options.root) as client:
        image = client.pull(options.image)
        before = fetched_bytes(client)
        with client.mount(image, read_only=True) as tree:
            files, size_bytes = measure(tree.path)
            print(
                f"{files:,} files of {size_bytes:,} bytes; fetched for that: "
                f"{fetched_bytes(client) - before:,} bytes"
            )
            print(Path(tree.path, options.file.lstrip("/")).read_text().rstrip())
            print(f"fetched in all: {fetched_bytes(client) - before:,} bytes")


def measure(directory: str) -> tuple[int, int]:
    """How many regular files there are below a directory, and their sizes together."""
    files = size_bytes = 0
    for path, _, names in os.walk(directory):
        for name in names:
            status = os.lstat(os.path.join(path, name))
            files, size_bytes = files + 1, size_bytes + status.st_size
    return files, size_bytes


def fetched_bytes(client: api.Client) -> int:
    """What came from the cache server since the snapshotter was started."""
    return client.status().counters.get("fetched_bytes", 0)


if __name__ == "__main__":
    main()
