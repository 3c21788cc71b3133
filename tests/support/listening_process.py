"""A program for tests of supervision: listens on a Unix socket and waits, or ends at once.

``python -m tests.support.listening_process SOCKET`` or ``… --fail``.
"""

import signal
import socket
import sys
from pathlib import Path


def main() -> int:
    """Never returns when it listens."""
    if sys.argv[1] == "--fail":
        print("it cannot work", file=sys.stderr)
        return 3
    path = Path(sys.argv[1])
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
