"""Ingests container images into content-addressed chunks and serves them over cache-v1."""
