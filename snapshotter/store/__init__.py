"""Verified content on local disk: objects, arrivals, partial files, and what fetches them."""
