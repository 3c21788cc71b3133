"""Which file with credentials a user means, before anybody reads it (containers-auth.json(5))."""

from __future__ import annotations

import os
from collections.abc import Mapping


def chosen_authfile(
    given: str | os.PathLike[str] | None, environ: Mapping[str, str] = os.environ
) -> str | None:
    """The absolute path of the file that was named, by option or in the environment.

    ``$REGISTRY_AUTH_FILE`` comes before ``$DOCKER_CONFIG``, a directory that may have a
    config.json. None leaves it to the cache server, which looks at the usual places of its user.
    """
    path = os.fspath(given) if given else environ.get("REGISTRY_AUTH_FILE", "")
    if not path and environ.get("DOCKER_CONFIG"):
        config = os.path.join(environ["DOCKER_CONFIG"], "config.json")
        path = config if os.path.exists(config) else ""
    return os.path.abspath(os.path.expanduser(path)) if path else None


def usual_authfiles(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Where podman, skopeo and docker keep a user's credentials, in the order they are looked at.

    The named ones (``chosen_authfile``) come first. Whether they exist is not looked at.
    """
    home = environ.get("HOME") or os.path.expanduser("~")
    config = environ.get("XDG_CONFIG_HOME") or os.path.join(home, ".config")
    run = environ.get("XDG_RUNTIME_DIR")
    containers = f"{run}/containers" if run else f"/run/containers/{os.getuid()}"
    chosen = chosen_authfile(None, environ)
    usual = [
        f"{containers}/auth.json",
        f"{config}/containers/auth.json",
        f"{home}/.docker/config.json",
    ]
    return [path for path in (chosen, *usual) if path is not None]
