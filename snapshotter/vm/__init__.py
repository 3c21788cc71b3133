"""Guests: an image as the root file system of a virtual machine."""
