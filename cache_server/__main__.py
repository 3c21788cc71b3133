"""``python -m cache_server`` is the ``cache-server`` command."""

from cache_server.cli import main

if __name__ == "__main__":
    main()
