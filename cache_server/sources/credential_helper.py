"""Docker's credential helpers: programs ``docker-credential-NAME`` that keep credentials.

``get`` reads a server's address from standard input and answers with JSON, or fails with a line of
text on standard output (the protocol of the docker-credential-helpers project).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal

import msgspec

from snapshotter.decoding import DECODE_ERRORS
from snapshotter.errors import AccessDeniedError, InvalidInputError, UnavailableError

HELPER_TIMEOUT_S = 30.0
"""How long a helper may take: some ask a service, none can ask a person here."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_NOT_FOUND = "credentials not found in native keychain"
_SHOWN_CHARS = 200


class _Answer(msgspec.Struct, rename="pascal"):
    username: str = ""
    secret: str = ""


async def ask_helper(
    name: str, server: str, *, named_in: str, timeout_s: float = HELPER_TIMEOUT_S
) -> tuple[str, str] | None:
    """User and secret that the helper has for ``server``; None if it has none.

    Raises InvalidInputError for a name that is none, AccessDeniedError if the helper cannot be run
    or fails, UnavailableError if it takes too long; it is then killed.
    """
    what = f"docker-credential-{name} (named in {named_in}) for {server}"
    if _NAME.fullmatch(name) is None:
        raise InvalidInputError(
            f"authfile {named_in}: {name[:80]!r} is no credential helper's name"
        )
    try:
        process = await asyncio.create_subprocess_exec(
            f"docker-credential-{name}",
            "get",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise AccessDeniedError(
            f"{what}: cannot run it: {error.strerror}; it must be on the cache server's PATH"
        ) from error
    try:
        async with asyncio.timeout(timeout_s):
            output, errors = await process.communicate(server.encode())
    except TimeoutError as error:
        raise UnavailableError(f"{what}: no answer within {timeout_s:g} s") from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with what it may have started
        await process.wait()
    if process.returncode != 0:
        said = (output.strip() or errors.strip()).decode(errors="replace")
        if _NOT_FOUND in said:
            return None
        raise AccessDeniedError(f"{what}: failed ({process.returncode}): {said[:_SHOWN_CHARS]}")
    return _parsed(output, what)


def _parsed(output: bytes, what: str) -> tuple[str, str] | None:
    try:
        answer = msgspec.json.decode(output, type=_Answer)
    except DECODE_ERRORS:
        # without the cause, which may quote a secret
        raise AccessDeniedError(f"{what}: its answer is not what a helper's get is") from None
    return (answer.username, answer.secret) if answer.secret else None
