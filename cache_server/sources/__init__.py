"""Where images come from: references, and the registries and OCI layouts that they name."""
