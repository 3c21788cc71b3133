"""Loop devices, for metadata images where EROFS cannot read a file by itself (before Linux 6.12,
or on overlayfs and tmpfs). Numbers: the kernel's include/uapi/linux/loop.h.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

from snapshotter.errors import BusyError

CONTROL = "/dev/loop-control"
_LOOP_CONFIGURE = 0x4C0A
_LOOP_CTL_GET_FREE = 0x4C82
_READ_ONLY, _AUTOCLEAR = 1, 4
_FLAGS_AT = 8 + 52  # struct loop_config: fd, block_size, then loop_info64 with lo_flags at 52
_CONFIG_BYTES = 304
_TRIES = 16


def attach(image: str) -> tuple[int, str]:
    """A read-only loop device of a file: its descriptor and path.

    The device ends by itself when neither the descriptor nor a mount holds it. Raises BusyError
    when others took every free device first, OSError when this host has no loop devices.
    """
    backing = os.open(image, os.O_RDONLY | os.O_CLOEXEC)
    try:
        control = os.open(CONTROL, os.O_RDWR | os.O_CLOEXEC)
        try:
            for _ in range(_TRIES):
                path = f"/dev/loop{fcntl.ioctl(control, _LOOP_CTL_GET_FREE)}"
                device = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                if _configure(device, backing):
                    return device, path
                os.close(device)
        finally:
            os.close(control)
    finally:
        os.close(backing)
    raise BusyError(f"loop device for {image}: others took each free one; try again")


def _configure(device: int, backing: int) -> bool:
    """Ties the device to the file; False if somebody else was quicker."""
    config = bytearray(_CONFIG_BYTES)
    struct.pack_into("<II", config, 0, backing, 0)
    struct.pack_into("<I", config, _FLAGS_AT, _READ_ONLY | _AUTOCLEAR)
    try:
        fcntl.ioctl(device, _LOOP_CONFIGURE, config)
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        os.close(device)
        raise
    return True
