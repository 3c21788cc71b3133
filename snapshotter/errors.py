"""The one tree of errors. Each boundary (errno, exit code, cache-v1 code) translates it once.

A message names the operation and the object and, where there is one, the way out.
"""

from __future__ import annotations

import errno
from typing import ClassVar


class SnapshotterError(Exception):
    """Anything this project raises on purpose. ``code`` is its cache-v1 error code."""

    code: ClassVar[str] = "request_failed"
    errno: ClassVar[int] = errno.EIO
    exit_code: ClassVar[int] = 1


class InvalidInputError(SnapshotterError):
    """Input that breaks a format or a rule (a tar, a frame, an option); nothing was changed."""

    code = "invalid_request"
    errno = errno.EINVAL
    exit_code = 2


class NotFoundError(SnapshotterError):
    """The named thing does not exist, and that is proven (not merely unreachable)."""

    code = "not_found"
    errno = errno.ENOENT
    exit_code = 3


class ExistsError(SnapshotterError):
    """A thing of that name is there already; nothing was changed."""

    code = "already_exists"
    errno = errno.EEXIST
    exit_code = 1


class AccessDeniedError(SnapshotterError):
    """The other side knows who asks and refuses, or wants credentials that were not given."""

    code = "permission_denied"
    errno = errno.EACCES
    exit_code = 4


class UnavailableError(SnapshotterError):
    """The other side cannot be reached, or did not answer in time; trying again may help."""

    code = "unavailable"
    exit_code = 5


class BusyError(SnapshotterError):
    """Nothing was done because of load or because the thing is in use; try again later."""

    code = "busy"
    errno = errno.EBUSY
    exit_code = 6


class CorruptError(SnapshotterError):
    """Bytes are not what their digest says. They were not used."""

    code = "corrupt"
    exit_code = 7


class UnsupportedError(SnapshotterError):
    """This host, kernel or peer cannot do what was asked; the message says what is missing."""

    code = "unsupported_version"
    errno = errno.EOPNOTSUPP
    exit_code = 8


class SandboxError(SnapshotterError):
    """A command could not be run in a sandbox.

    ``status`` is the exit status for it: 127 when it does not exist, 126 when it cannot be
    executed, else 125.
    """

    def __init__(self, message: str, status: int = 125) -> None:
        super().__init__(message)
        self.status = status


class CommandFailedError(SnapshotterError):
    """A command in a sandbox that had to succeed did not; ``exit_status`` is 128+n for signal n."""

    def __init__(self, message: str, *, exit_status: int, stdout: bytes, stderr: bytes) -> None:
        super().__init__(message)
        self.exit_status = exit_status
        self.stdout = stdout
        self.stderr = stderr


class CommandTimeoutError(SnapshotterError):
    """A command in a sandbox took too long and was killed; its output until then is here."""

    def __init__(self, message: str, *, stdout: bytes = b"", stderr: bytes = b"") -> None:
        super().__init__(message)
        self.stdout = stdout
        self.stderr = stderr


class DiskFullError(SnapshotterError):
    """Content cannot be kept: the disk is full, or has less free space than is to be left."""

    code = "disk_full"
    errno = errno.ENOSPC
    exit_code = 9


BY_CODE: dict[str, type[SnapshotterError]] = {
    cls.code: cls
    for cls in (
        SnapshotterError,
        InvalidInputError,
        NotFoundError,
        AccessDeniedError,
        UnavailableError,
        BusyError,
        CorruptError,
        UnsupportedError,
        DiskFullError,
    )
}


def from_code(code: str, message: str) -> SnapshotterError:
    """The error that a peer's ``code`` stands for; an unknown code is a plain SnapshotterError."""
    return BY_CODE.get(code, SnapshotterError)(message)
