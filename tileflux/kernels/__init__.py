"""Main loops and movers, each with its launcher and its host twin."""
