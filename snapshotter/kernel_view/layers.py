"""Which layers and options an overlay of the kernel view is made of. Pure: values in, values out.

The lowers, in the order in which overlayfs searches content::

    META :: OBJECTS :: GATE/g<image> :: ARRIVALS :: GATE/v

META gives names, everything behind ``::`` only content (data-only lowers, Linux 6.5 and later).
Options by their names in the kernel's Documentation/filesystems/overlayfs.rst.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from snapshotter.errors import InvalidInputError

Options = list[tuple[str, str | None]]
"""Mount options in order; None marks a flag. Lowers are ``lowerdir+`` and ``datadir+``."""

MAX_MOUNT_DATA_BYTES = 4095
"""mount(2) takes one page of options, with its closing NUL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewLayers:
    """The directories of one view. ``metadata`` may be ``/proc/self/fd/N`` of a detached mount."""

    metadata: str
    objects: str
    arrivals: str
    gate: str
    image_number: int
    upper: str | None = None
    work: str | None = None
    volatile: bool = False
    above: tuple[str, ...] = ()
    """Ordinary directories between upper and META, topmost first: names and content."""
    self_contained: bool = False
    """The upper never holds mere headers of files below: for whoever reads it without the view.
    A chmod then copies the file up, and renaming a directory of the image is EXDEV, as it is with
    overlayfs by default. Follows redirects from 6.16 on."""

    def __post_init__(self) -> None:
        if (self.upper is None) != (self.work is None):
            raise InvalidInputError("an upper needs a work directory beside it, and the reverse")
        if self.volatile and self.upper is None:
            raise InvalidInputError("a view without an upper cannot be volatile")


def overlay_options(layers: ViewLayers) -> Options:
    """The options of the view's overlay, with paths as they are.

    With an upper, metacopy and redirect_dir must both be on, unless it is to be self-contained.
    Without one, redirects are followed.
    What a kernel's own defaults might turn on is said to be off: an index ties an upper to one
    superblock, nfs_export forbids metacopy, and xino changes inode numbers.
    """
    on, redirects = "on", "follow"
    if layers.upper is not None:
        on, redirects = ("off", "off") if layers.self_contained else ("on", "on")
    options: Options = [
        *(("lowerdir+", directory) for directory in layers.above),
        ("lowerdir+", layers.metadata),
        ("datadir+", layers.objects),
        ("datadir+", f"{layers.gate}/g{layers.image_number}"),
        ("datadir+", layers.arrivals),
        ("datadir+", f"{layers.gate}/v"),
        ("metacopy", on),
        ("redirect_dir", redirects),
        ("index", "off"),
        ("nfs_export", "off"),
        ("xino", "off"),
    ]
    if layers.upper is not None:
        options += [("upperdir", layers.upper), ("workdir", layers.work)]
    if layers.volatile:
        options.append(("volatile", None))
    return options


def api_options(options: Iterable[tuple[str, str | None]]) -> Options:
    """The options as fsconfig(2) takes them: the kernel removes backslashes from an upper's paths,
    but not from those of ``lowerdir+`` and ``datadir+`` (seen with 6.18).
    """
    return [
        (key, _escape(value, "") if value and key in ("upperdir", "workdir") else value)
        for key, value in options
    ]


def mount_data(options: Iterable[tuple[str, str | None]]) -> str:
    """The options as one string for mount(2), where the kernel has no ``lowerdir+``.

    Raises InvalidInputError when they do not fit into a page.
    """
    data = ",".join(mount_options(options))
    if len(data.encode("utf-8", "surrogateescape")) > MAX_MOUNT_DATA_BYTES:
        raise InvalidInputError(
            f"overlay options of {len(data)} characters do not fit into a page: "
            "use a shorter root or upper path"
        )
    return data


def mount_options(options: Iterable[tuple[str, str | None]]) -> list[str]:
    """The options one by one as mount(2) takes them, all lowers in the first."""
    lowers, rest = "", []
    for key, value in options:
        if value is None:
            rest.append(key)
        elif key == "lowerdir+":
            lowers += (":" if lowers else "") + _escape(value, ",:")
        elif key == "datadir+":
            lowers += "::" + _escape(value, ",:")
        else:
            rest.append(f"{key}={_escape(value, ',')}")
    return [f"lowerdir={lowers}", *rest]


def _escape(path: str, special: str) -> str:
    return "".join(f"\\{char}" if char in special or char == "\\" else char for char in path)
