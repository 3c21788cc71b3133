"""Archive formats that layers are stored in."""
