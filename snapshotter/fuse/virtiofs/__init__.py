"""The virtio-fs transport: a vhost-user back end that serves FUSE requests out of guest memory."""
