"""Where images come from: references, and the registries, layouts and archives they name."""
