from __future__ import annotations

import pytest

from tileflux.testing.ptx_lint import lint

STORE = "st.global.b32 [%rd1], %r1;"
LOAD = "ld.global.b32 %r2, [%rd2];"
BARRIER = "bar.sync 0;"
RELEASE = "@%p1 st.release.sys.global.s32 [%rd3], %r3;"
COUNT = "@%p1 atom.global.gpu.release.add.u32 %r6, [%rd6], 1;"
ACQUIRE = "@%p1 ld.global.sys.acquire.b32 %r4, [%rd4];"
TMA_STORE = "@%p1 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd5, {%r3, %r3}], [%r2];"
TMA_LOAD = (
    "@%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r8], [%rd5, {%r1, %r2}], [%r9];"
)
READ_WAIT = "cp.async.bulk.wait_group.read 0;"
FULL_WAIT = "cp.async.bulk.wait_group 0;"
PROXY_FENCE = "fence.proxy.async.global;"
SPIN = f"$L__SPIN:\n{BARRIER}\n{ACQUIRE}\n{BARRIER}\n@%p2 bra $L__SPIN;"


def ptx(*lines: str) -> str:
    body = "\n".join(lines)
    return f".version 8.7\n.target sm_90a\n.visible .entry kernel()\n.reqntid 128\n{{\n{body}\nret;\n}}\n"


def problems(*lines: str, waits: bool = False, signals: bool = False, counts: bool = False) -> list[str]:
    return lint(ptx(*lines), waits=waits, signals=signals, counts=counts)


def only_problem(*lines: str, waits: bool = False, signals: bool = False, counts: bool = False) -> str:
    (problem,) = problems(*lines, waits=waits, signals=signals, counts=counts)
    return problem


def test_right_order_passes() -> None:
    assert problems(STORE, BARRIER, RELEASE, SPIN, LOAD, waits=True, signals=True) == []


def test_kernel_without_flags_passes() -> None:
    assert problems(LOAD, STORE) == []


# A wait acquires, and polls.


def test_wait_without_acquire() -> None:
    relaxed = SPIN.replace("acquire", "relaxed")
    assert "nothing acquires at sys scope" in only_problem(relaxed, LOAD, waits=True)


def test_wait_at_narrow_scope() -> None:
    missing, narrow = problems(SPIN.replace("sys", "gpu"), LOAD, waits=True)
    assert "nothing acquires at sys scope" in missing
    assert "orders at gpu scope" in narrow


def test_missing_wait() -> None:
    assert "nothing acquires" in only_problem(LOAD, STORE, waits=True)
    assert problems(LOAD, STORE, waits=False) == []


def test_flag_looked_at_once() -> None:
    assert "looked at only once" in only_problem(ACQUIRE, BARRIER, LOAD, waits=True)


def test_flag_looked_at_once_in_a_working_loop() -> None:
    loop = ("$L__LOOP:", ACQUIRE, BARRIER, LOAD, STORE, "@%p2 bra $L__LOOP;")
    assert "looked at only once" in only_problem(*loop, waits=True)


@pytest.mark.parametrize("step", ["add.s64 %rd4, %rd4, 4;", "ld.shared.b64 %rd4, [%r9];"])
def test_one_flag_after_another_is_no_wait(step: str) -> None:
    loop = ("$L__LOOP:", step, ACQUIRE, BARRIER, "@%p2 bra $L__LOOP;")
    assert "looked at only once" in only_problem(*loop, waits=True)


def test_spin_inside_one_asm_block() -> None:
    spin = f"{{ .reg .pred done; again: {ACQUIRE} setp.ge.s32 done, %r4, %r5; @!done bra again; }}"
    assert problems(spin, BARRIER, LOAD, waits=True) == []


@pytest.mark.parametrize(
    "poll",
    [
        "ld.acquire.sys.global.s32 %r4, [%rd4];",
        "atom.global.acquire.sys.add.u32 %r4, [%rd4], 0;",
        "atom.acq_rel.sys.global.cas.b32 %r4, [%rd4], %r5, %r6;",
        "multimem.ld_reduce.acquire.sys.global.min.u32 %r4, [%rd4];",
    ],
)
def test_spellings_of_an_acquiring_poll(poll: str) -> None:
    assert problems("$L__SPIN:", BARRIER, poll, BARRIER, "@%p2 bra $L__SPIN;", LOAD, waits=True) == []


@pytest.mark.parametrize("fence", ["fence.acq_rel.sys;", "fence.sc.sys;", "membar.sys;"])
def test_relaxed_poll_with_fence(fence: str) -> None:
    spin = ("$L__SPIN:", "ld.relaxed.sys.global.b32 %r4, [%rd4];", "@%p2 bra $L__SPIN;")
    assert problems(*spin, fence, BARRIER, LOAD, waits=True) == []
    assert "no CTA barrier between the acquire" in only_problem(*spin, fence, LOAD, waits=True)


def test_fence_after_nothing_polled_is_no_acquire() -> None:
    assert "nothing acquires" in only_problem("fence.acq_rel.sys;", BARRIER, LOAD, waits=True)
    spin = ("$L__SPIN:", "@%p1 ld.relaxed.sys.global.b32 %r4, [%rd4];", "@%p2 bra $L__SPIN;")
    assert "nothing acquires" in only_problem(*spin, BARRIER, "fence.acq_rel.sys;", BARRIER, LOAD, waits=True)


# A signal releases.


def test_missing_signal() -> None:
    assert "nothing releases at sys scope" in only_problem(STORE, BARRIER, signals=True)


def test_fence_before_no_store_is_no_signal() -> None:
    assert "nothing releases" in only_problem(STORE, BARRIER, "fence.acq_rel.sys;", BARRIER, STORE, signals=True)


def test_record_of_a_wait_that_gave_up_is_no_signal() -> None:
    swap = "atom.global.acq_rel.sys.cas.b32 %r6, [%rd6], 0, 1;"
    record = (SPIN, "@%p3 bra $L__DONE;", BARRIER, swap, BARRIER, RELEASE, "$L__DONE:", LOAD)
    assert problems(*record, waits=True) == []
    assert "nothing releases" in only_problem(*record, waits=True, signals=True)
    assert problems(*record, BARRIER, RELEASE, waits=True, signals=True) == []
    clock = "mov.u64 %rd7, %globaltimer;"
    warning = (SPIN, "@%p3 bra $L__DONE;", clock, BARRIER, RELEASE, "$L__DONE:", LOAD)
    assert "nothing releases" in only_problem(*warning, waits=True, signals=True)
    assert problems(*warning, BARRIER, RELEASE, waits=True, signals=True) == []


# System scope.


@pytest.mark.parametrize("scope", ["cta", "cluster", "gpu"])
def test_release_at_narrow_scope(scope: str) -> None:
    narrow = RELEASE.replace("sys", scope)
    (missing, problem) = problems(STORE, BARRIER, narrow, signals=True)
    assert "nothing releases at sys scope" in missing
    assert f"orders at {scope} scope" in problem and "PTX line 8" in problem


def test_release_without_scope_is_at_gpu_scope() -> None:
    found = problems(STORE, BARRIER, RELEASE, BARRIER, "red.release.global.add.u32 [%rd1], 1;", signals=True)
    assert len(found) == 1 and "orders at gpu scope" in found[0]


def test_acquire_at_narrow_scope() -> None:
    narrow = ACQUIRE.replace("sys", "gpu")
    assert "orders at gpu scope" in only_problem(SPIN, LOAD, BARRIER, narrow, waits=True)


def test_fence_at_narrow_scope() -> None:
    found = problems(STORE, BARRIER, "fence.acq_rel.gpu;", "st.relaxed.sys.global.b32 [%rd3], %r3;", signals=True)
    assert any("`fence.acq_rel.gpu` (PTX line 8) orders at gpu scope" in problem for problem in found)


def test_narrow_scope_is_fine_without_flags() -> None:
    assert problems(STORE, BARRIER, "atom.global.acq_rel.gpu.add.u32 %r1, [%rd1], 1;") == []


def test_shared_memory_is_not_a_flag() -> None:
    inside = "atom.shared.acq_rel.cta.add.u32 %r1, [%r2], 1;"
    assert problems(STORE, BARRIER, RELEASE, inside, signals=True) == []


# Acquire, then CTA barrier.


def test_load_after_acquire_without_barrier() -> None:
    problem = only_problem(SPIN.removesuffix(f"{BARRIER}\n@%p2 bra $L__SPIN;"), "@%p2 bra $L__SPIN;", LOAD, waits=True)
    assert "no CTA barrier between the acquire" in problem and LOAD.rstrip(";") in problem


@pytest.mark.parametrize(
    "load", ["cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, 0x10;", "ld.b32 %r1, [%rd1];"]
)
def test_kinds_of_load_after_acquire(load: str) -> None:
    assert "and the load" in only_problem(ACQUIRE, load)
    assert problems(ACQUIRE, BARRIER, load) == []


def test_barrier_on_one_branch_only() -> None:
    assert "and the load" in only_problem(ACQUIRE, "@%p3 bra $L__LOAD;", BARRIER, "$L__LOAD:", LOAD)


def test_warp_barrier_is_no_cta_barrier() -> None:
    text = ptx(ACQUIRE, "bar.warp.sync -1;", LOAD)
    assert len(lint(text, waits=False, signals=False)) == 1
    assert lint(text.replace(".reqntid 128", ".reqntid 32"), waits=False, signals=False) == []


def test_one_problem_a_load_however_many_polls() -> None:
    assert "PTX line 6" in only_problem(ACQUIRE, ACQUIRE, LOAD)


# Acquire, then proxy fence, then TMA load.


def test_tma_load_after_acquire() -> None:
    assert "no fence.proxy.async between" in only_problem(SPIN, TMA_LOAD, waits=True)
    assert "no fence.proxy.async between" in only_problem(SPIN, "fence.proxy.async.shared::cta;", TMA_LOAD, waits=True)
    assert problems(SPIN, PROXY_FENCE, TMA_LOAD, waits=True) == []
    assert problems(SPIN, "fence.proxy.async;", TMA_LOAD, waits=True) == []
    assert problems(TMA_LOAD, SPIN, waits=True) == []


# CTA barrier, then release.


def test_store_then_release_without_barrier() -> None:
    problem = only_problem(BARRIER, STORE, RELEASE, signals=True)
    assert problem.startswith("no CTA barrier between `st.global.b32 [%rd1], %r1` (PTX line 7) and the release")


def test_store_between_barrier_and_release() -> None:
    assert "no CTA barrier between" in only_problem(STORE, BARRIER, STORE, RELEASE, signals=True)


def test_release_without_any_barrier() -> None:
    assert "path from the kernel's start" in only_problem(LOAD, RELEASE, signals=True)
    assert "path from the kernel's start" in only_problem(RELEASE, signals=True)
    assert problems(BARRIER, RELEASE, signals=True) == []


def test_way_around_the_barrier() -> None:
    around = (STORE, "@%p3 bra $L__RELEASE;", BARRIER, "$L__RELEASE:", RELEASE)
    assert "no CTA barrier between" in only_problem(*around, signals=True)


def test_store_of_the_turn_before() -> None:
    loop = (BARRIER, "$L__LOOP:", RELEASE, STORE, "@%p3 bra $L__LOOP;")
    assert "no CTA barrier between" in only_problem(*loop, signals=True)


def test_guarded_barrier_does_not_count() -> None:
    assert "no CTA barrier between" in only_problem(STORE, f"@%p4 {BARRIER}", RELEASE, signals=True)


@pytest.mark.parametrize(
    "store",
    [
        "st.b32 [%rd1], %r1;",
        "red.global.add.f32 [%rd1], %r1;",
        "multimem.st.relaxed.sys.global.b32 [%rd1], %r1;",
        "multimem.red.relaxed.sys.global.add.f32 [%rd1], %r1;",
        "call.uni helper, (param0);",
    ],
)
def test_kinds_of_store_before_release(store: str) -> None:
    assert "no CTA barrier between" in only_problem(BARRIER, store, RELEASE, signals=True)


@pytest.mark.parametrize(
    "release",
    [
        "atom.global.sys.release.exch.b32 %r5, [ %rd3 + 0 ], %r6;",
        "atom.global.acq_rel.sys.add.u32 %r5, [%rd3], 1;",
        "red.release.sys.global.add.u32 [%rd3], 1;",
        "multimem.red.release.sys.global.add.u32 [%rd3], 1;",
        "fence.acq_rel.sys;\nst.relaxed.sys.global.b32 [%rd3], %r3;",
        "membar.sys;\nst.volatile.global.b32 [%rd3], %r3;",
    ],
)
def test_spellings_of_a_release(release: str) -> None:
    assert "no CTA barrier between" in only_problem(BARRIER, STORE, release, signals=True)
    assert problems(STORE, BARRIER, release, signals=True) == []


def test_flag_of_the_signal_before_is_not_data() -> None:
    assert problems(STORE, BARRIER, RELEASE, RELEASE, signals=True) == []


# Counts, which others on the same GPU wait for.


def test_count_within_the_gpu() -> None:
    assert problems(STORE, BARRIER, COUNT, counts=True) == []
    assert problems(STORE, BARRIER, RELEASE, BARRIER, STORE, BARRIER, COUNT, counts=True, signals=True) == []
    assert "orders at gpu scope" in only_problem(STORE, BARRIER, COUNT, BARRIER, RELEASE, signals=True)


def test_missing_count() -> None:
    assert "nothing adds with a release" in only_problem(STORE, BARRIER, RELEASE, counts=True)
    relaxed = COUNT.replace("release", "relaxed")
    assert "nothing adds with a release" in only_problem(STORE, BARRIER, relaxed, counts=True)


@pytest.mark.parametrize("other", [RELEASE.replace("sys", "gpu"), COUNT.replace("gpu", "cta")])
def test_only_what_counts_may_do_with_the_gpu(other: str) -> None:
    assert any("scope where flags need sys" in each for each in problems(STORE, BARRIER, COUNT, other, counts=True))


def test_count_behind_what_it_publishes() -> None:
    assert "no CTA barrier between" in only_problem(BARRIER, STORE, COUNT, counts=True)
    assert "no `cp.async.bulk.wait_group 0`" in only_problem(TMA_STORE, READ_WAIT, BARRIER, COUNT, counts=True)
    assert problems(TMA_STORE, FULL_WAIT, BARRIER, COUNT, counts=True) == []


def test_count_is_no_signal() -> None:
    assert "nothing releases at sys scope" in only_problem(STORE, BARRIER, COUNT, signals=True, counts=True)


# TMA stores.


def test_tma_store_then_release() -> None:
    assert "no `cp.async.bulk.wait_group 0`" in only_problem(TMA_STORE, BARRIER, RELEASE, signals=True)
    assert "no `cp.async.bulk.wait_group 0`" in only_problem(TMA_STORE, READ_WAIT, BARRIER, RELEASE, signals=True)
    unfinished = "cp.async.bulk.wait_group 1;"
    assert "no `cp.async.bulk.wait_group 0`" in only_problem(TMA_STORE, unfinished, BARRIER, RELEASE, signals=True)
    assert problems(TMA_STORE, READ_WAIT, FULL_WAIT, BARRIER, RELEASE, signals=True) == []


def test_tma_store_of_the_turn_before() -> None:
    loop = ("$L__LOOP:", BARRIER, RELEASE, TMA_STORE, READ_WAIT, "@%p3 bra $L__LOOP;")
    assert "no `cp.async.bulk.wait_group 0`" in only_problem(*loop, signals=True)


def test_wait_for_tma_store_needs_the_barrier_after_it() -> None:
    problem = only_problem(TMA_STORE, BARRIER, FULL_WAIT, RELEASE, signals=True)
    assert problem.startswith("no CTA barrier between `cp.async.bulk.wait_group 0`")


def test_what_is_not_ptx_is_refused() -> None:
    with pytest.raises(ValueError, match="not the PTX of a kernel"):
        lint("", waits=False, signals=False)
