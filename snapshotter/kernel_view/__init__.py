"""The kernel view: overlayfs over EROFS and local objects, with a FUSE gate for what is missing."""
