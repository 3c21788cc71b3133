"""The daemon and its processes."""
