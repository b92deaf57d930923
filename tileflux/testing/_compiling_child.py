"""A process of ``testing/compiling.py``: variants in on stdin, a line out on stdout for each.

Run as a script, by its path: first comes the search path by which the rest can be imported.
"""

from __future__ import annotations

import os
import pickle
import sys

__all__ = ["COMPILED", "GIVEN_UP", "main"]

COMPILED, GIVEN_UP = b"compiled\n", b"given up\n"


def main() -> None:
    """Compile until stdin ends."""
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what compilers and imported modules print must not mix with the answers
        sys.path[:] = pickle.load(sys.stdin.buffer)
        from tileflux.testing.compiling import pretend

        is_pretending = False
        while True:
            try:
                variant = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            if not is_pretending:
                pretend(variant.arch)
                is_pretending = True
            try:
                variant.compile()
                answer = COMPILED
            except Exception:  # whatever it is, the launch will meet it and say so
                answer = GIVEN_UP
            answers.write(answer)
            answers.flush()


if __name__ == "__main__":
    main()
