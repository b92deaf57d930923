"""``python -m tileflux``: the same as the ``tileflux`` command."""

from __future__ import annotations

import sys

from tileflux.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
