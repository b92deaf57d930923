"""Which main loop the problems of ``dense_gpu.py`` take that are for Hopper's; one line each. Nothing is compiled.

``python -m tests.ops.dense_loops``, in a process that does not interpret kernels.
"""

from __future__ import annotations

from typing import Any

import tileflux
from tileflux.kernels import gemm_launch
from tileflux.testing.rehearsal import H200, rehearse, stand_in_for

from .dense_gpu import HOPPER_DTYPES, problems

WORLD_SIZES = (2, 4, 8)


def main() -> None:
    """Print (world size, kind of ranks, dtype, op, shape, whether it should fall back, loops it was launched on)."""
    loops: set[str] = set()

    def launched(loop: str) -> Any:
        def launch(*_: object, load_only: bool = False, **__: object) -> None:
            if not load_only:
                loops.add(loop)

        return launch

    rehearse(H200)
    vars(gemm_launch).update(
        launch_hopper=launched("hopper"), _launch_triton=launched("triton"), load_hopper=lambda *_: None
    )
    for world_size, is_virtual in [(size, True) for size in WORLD_SIZES] + [(2, False), (4, False)]:
        groups = [stand_in_for(world_size, rank, is_virtual=is_virtual) for rank in range(world_size)]
        for problem in (each for dtype in HOPPER_DTYPES for each in problems(world_size, dtype, hopper=True)):
            loops.clear()
            # A rank without rows has nothing that TMA could load, and takes Triton's.
            rank = max(range(world_size), key=problem.case.sizes.__getitem__)
            given = problem.case.arguments(problem.op, rank)
            getattr(tileflux, problem.op)(**given, group=groups[rank], strategy="fused", **problem.options)
            kind, dtype = "virtual" if is_virtual else "mps", str(problem.case.xs[0].dtype)
            shape = "x".join(map(str, problem.case.shape))
            print(world_size, kind, dtype, problem.op, shape, problem.falls_back, *sorted(loops))


if __name__ == "__main__":
    main()
