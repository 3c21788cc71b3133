"""Which file with credentials a user means, before anybody reads it (containers-auth.json(5))."""

from __future__ import annotations

import os
from collections.abc import Mapping


def chosen_authfile(
    given: str | os.PathLike[str] | None, environ: Mapping[str, str] = os.environ
) -> str | None:
    """The absolute path of the file that was named, by option or in the environment.

    ``$REGISTRY_AUTH_FILE`` comes before ``$DOCKER_CONFIG``, the directory of a config.json. None
    leaves it to the cache server, which looks at the usual places of its user.
    """
    path = os.fspath(given) if given else environ.get("REGISTRY_AUTH_FILE", "")
    if not path and environ.get("DOCKER_CONFIG"):
        path = os.path.join(environ["DOCKER_CONFIG"], "config.json")
    return os.path.abspath(os.path.expanduser(path)) if path else None
