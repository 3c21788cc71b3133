"""Tables, sizes and progress: rich on a terminal, plain text elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from snapshotter.service import control
from snapshotter.service.control_client import ProgressCallback

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size_text(size_bytes: int) -> str:
    """``3.0 MiB``."""
    amount = float(size_bytes)
    for unit in _UNITS[:-1]:
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} {_UNITS[-1]}"


def age_text(since_s: float, *, now_s: float | None = None) -> str:
    """How long ago, in its largest unit: ``5m``."""
    age = max(0, int((time.time() if now_s is None else now_s) - since_s))
    for unit, seconds in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if age >= seconds:
            return f"{age // seconds}{unit}"
    return f"{age}s"


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table of rich on a terminal; else aligned columns, one row a line."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, header_style="bold", pad_edge=False)
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        Console().print(table)
        return
    lines = [columns, *rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())


def print_fields(fields: Sequence[tuple[str, str]]) -> None:
    """Names and values, one a line, aligned."""
    width = max(len(name) for name, _ in fields) + 1
    for name, value in fields:
        print(f"{name + ':':<{width}} {value}")


@contextmanager
def pull_progress(*, quiet: bool = False) -> Iterator[ProgressCallback | None]:
    """Shows a pull's progress as bars on stderr, if that is a terminal and not ``quiet``."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    bars = _Bars()
    try:
        yield bars.show
    finally:
        bars.close()


class _Bars:
    """One bar for each phase and layer; rich is loaded when the first is needed."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._tasks: dict[tuple[str, str | None], TaskID] = {}

    def show(self, progress: control.Progress) -> None:
        """Moves the bar of this progress, which is added if it is new."""
        bars = self._progress = self._progress or _start_bars()
        key = (progress.phase, progress.layer)
        if key not in self._tasks:
            layer = (progress.layer or "").removeprefix("sha256:")[:12]
            self._tasks[key] = bars.add_task(f"{progress.phase} {layer}".strip(), total=None)
        bars.update(self._tasks[key], completed=progress.done_bytes, total=progress.total_bytes)

    def close(self) -> None:
        """Takes the bars away and ends the thread that draws them."""
        if self._progress is not None:
            self._progress.stop()


def _start_bars() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        console=Console(stderr=True),
        transient=True,
    )
    bars.start()
    return bars
