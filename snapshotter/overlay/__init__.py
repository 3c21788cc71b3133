"""The userspace overlay: lowers and an upper, in kernel overlayfs's format on disk."""
