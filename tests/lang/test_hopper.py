"""What Gluon and Triton differ in: the functions of ``lang/`` mean the same to both, and to a partition."""

from __future__ import annotations

import re

import pytest
import triton.language as tl

from tileflux.lang import hopper
from tileflux.testing.compile_gate import CompileCase, CompileReport, run_gate

KERNELS = "tests.lang.hopper_kernels"


def compiled(name: str, out: str) -> CompileReport:
    case = CompileCase(
        name=name,
        kernel=f"{KERNELS}:{name}",
        signature={"flag_ptr": "*i32", "guard_ptr": "*i64", "out_ptr": out},
        options={"num_warps": 8},
        architectures=(90,),
        waits=True,
        signals=True,
    )
    (report,) = run_gate([case])
    report.check()
    return report


def masks(ptx: str) -> set[int]:
    """What the number of a thread is compared by, in every store of a flag."""
    return {int(mask) for mask in re.findall(r"and\.b32 tid, tid, (\d+);", ptx)}


def test_one_thread_of_a_program_signals_and_one_of_each_partition() -> None:
    assert masks(compiled("triton_kernel", "*i32").ptx) == {255}
    assert masks(compiled("gluon_kernel", "*bf16").ptx) == {255, 31}


def test_a_partition_stores_sixteen_bytes_a_thread() -> None:
    assert "st.global.v4.b32" in compiled("gluon_kernel", "*bf16").ptx


@pytest.mark.parametrize("name", ["span", "lanes", "thread_numbers", "num_threads"])
def test_kernels_may_call_what_asks_who_compiles_them(name: str) -> None:
    assert tl.core.is_builtin(getattr(hopper, name))


def test_the_gate_notices_an_accumulator_that_wgmma_waits_for() -> None:
    """Nothing but WGMMA may write to a tile's sums before the last block of K."""
    case = CompileCase(
        name="serialised", kernel=f"{KERNELS}:serialised_kernel", signature={"out_ptr": "*fp32", "num_k": "i32"},
        options={"num_warps": 4}, architectures=(90,),
    )  # fmt: skip
    (report,) = run_gate([case])
    assert any("serialized" in problem for problem in report.problems), report.problems
