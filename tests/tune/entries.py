"""What tests of measured choices share: entries, made up or drawn."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import strategies as st

from tileflux.config import GemmConfig, GemmProblem
from tileflux.tune.store import STRATEGIES, Entry

H200 = GemmProblem("ag_gemm", 4096, 6144, 12288, 8, "bfloat16", arch=90, num_sms=132, link="NVLink", gpu="NVIDIA H200")


def make_entry(strategy: str = "fused", config: GemmConfig | None = None, **changes: Any) -> Entry:
    """An entry of H200 with some of its problem changed."""
    problem = dataclasses.replace(H200, **changes)
    seconds = {"sequential": 1.21e-3, "pipelined": 1.1e-3, "fused": 1.3e-3} | {strategy: 1e-3}
    algorithm = "two_shot" if problem.op == "gemm_ar" else ""
    versions = {"tileflux": "0.1.0", "torch": "2.11.0", "triton": "3.6.0"}
    return Entry(problem, strategy, algorithm, config or GemmConfig(), seconds, "2026-11-15", versions)


def drawn(op: str) -> st.SearchStrategy[Entry]:
    """Entries of one op that differ in what may differ between ranks, and a little in the rest."""
    return st.builds(
        lambda strategy, block_m, chunks, m, n, k, heavy: make_entry(
            strategy, GemmConfig(block_m, num_chunks=chunks), op=op, m=m, n=n, k=k, is_heavy=heavy
        ),
        st.sampled_from(STRATEGIES),
        st.sampled_from([16, 64, 128]),
        st.sampled_from([1, 2, 4]),
        st.sampled_from([1024, 2048, 4096, 4100]),
        st.sampled_from([1024, 1040, 4096]),
        st.sampled_from([1024, 1040, 4096]),
        st.booleans() if op == "ag_gemm" else st.just(False),
    )
