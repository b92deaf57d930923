"""Which strategy and which tiles a problem gets."""
