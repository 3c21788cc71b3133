"""The cache-v1 protocol and its client."""
