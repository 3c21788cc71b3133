"""``python -m snapshotter``: the command line."""

from snapshotter.cli.main import main

if __name__ == "__main__":
    main()
