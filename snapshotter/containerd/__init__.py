"""The snapshotter as containerd's: its Snapshots service, and what is asked of containerd."""
