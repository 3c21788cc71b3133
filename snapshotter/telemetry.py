"""Logs (one JSON object a line, on stderr) and counters of a process."""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter

import structlog


def configure_logging(process: str, *, verbose: bool = False) -> None:
    """Sends this process's log lines to stderr as JSON, each with the process's name."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=str),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.DEBUG if verbose else logging.INFO
        ),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(process=process)


class Counters:
    """Named totals of one process; adding is safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        """Adds ``amount`` to the total called ``name``."""
        with self._lock:
            self._totals[name] += amount

    def snapshot(self) -> dict[str, int]:
        """All totals, by name."""
        with self._lock:
            return dict(sorted(self._totals.items()))
