"""Mounts container images at once and fetches only what is touched."""

__version__ = "0.1.0"
