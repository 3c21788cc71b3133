"""The FUSE wire protocol, a server over it, and its transports."""
