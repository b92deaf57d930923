"""Every repair of the interpreter but those of arithmetic, which are in ``test_interpreter_numbers.py``."""

import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tileflux import env
from tileflux.lang.signal import GLOBALTIMER, poll, signal
from tileflux.testing import interpreter

pytestmark = pytest.mark.skipif(not env.interpreting(), reason="kernels of this process are compiled")


@pytest.fixture(autouse=True, scope="module")
def repaired() -> None:
    interpreter.install()
    interpreter.install()  # once is enough, twice does no harm


# Inline asm, flags, atomics.

DOUBLE = tl.constexpr("add.s32 $0, $1, $1;")
SPLIT = tl.constexpr("mov.s32 $0, $2; cvt.rn.f32.s32 $1, $2;")


@triton.jit
def _asm(x_ptr, out_ptr, half_ptr, N: tl.constexpr):
    elements = tl.arange(0, N)
    x = tl.load(x_ptr + elements)
    tl.store(out_ptr + elements, tl.inline_asm_elementwise(DOUBLE, "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1))
    same, as_float = tl.inline_asm_elementwise(
        SPLIT, "=r,=f,r", [x], dtype=(tl.int32, tl.float32), is_pure=True, pack=1
    )
    tl.store(half_ptr + elements, same + as_float / 2)


def test_inline_asm_means_what_was_registered() -> None:
    interpreter.register_asm(DOUBLE.value, lambda x: x + x)
    interpreter.register_asm(SPLIT.value, lambda x: [x, x.astype(np.float32)])
    x, out, half = torch.arange(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32), torch.zeros(8)
    _asm[(1,)](x, out, half, 8)
    assert torch.equal(out, 2 * x)
    assert torch.equal(half, 1.5 * x)


@triton.jit
def _trap(out_ptr):
    x = tl.inline_asm_elementwise("trap;", "=r,r", [1], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(out_ptr, x)


def test_unregistered_asm_is_named() -> None:
    with pytest.raises(InterpreterError, match=r"nothing registered for inline asm 'trap;'.*register_asm"):
        _trap[(1,)](torch.zeros(1))


@triton.jit
def _read_clock(out_ptr):
    lanes = tl.arange(0, 4)
    times = tl.inline_asm_elementwise(GLOBALTIMER, "=l,r", [lanes], dtype=tl.int64, is_pure=False, pack=1)
    tl.store(out_ptr + lanes, times)


def test_kernels_read_the_clock() -> None:
    out = torch.zeros(4, dtype=torch.int64)
    before = time.perf_counter_ns()
    _read_clock[(1,)](out)
    assert before < out[0].item() < time.perf_counter_ns()
    assert (out == out[0]).all()


@triton.jit
def _signal(flag, value):
    signal(flag, value)


def test_signal_stores_the_word_and_nothing_beside_it() -> None:
    flags = torch.zeros(3, dtype=torch.int32)
    _signal[(1,)](flags[1:2], -5)
    assert flags.tolist() == [0, -5, 0]


@triton.jit
def _add_bf16(total_ptr, x_ptr, N: tl.constexpr):
    elements = tl.arange(0, N)
    tl.atomic_add(total_ptr + elements, tl.load(x_ptr + elements), mask=elements != 1)


def test_atomic_add_of_bf16() -> None:
    total = torch.ones(8, dtype=torch.bfloat16)
    x = torch.arange(8).bfloat16()
    _add_bf16[(5,)](total, x, 8)
    expected = 1 + 5 * x
    expected[1] = 1
    assert torch.equal(total, expected)


@triton.jit
def _return_old_bf16(total_ptr, old_ptr):
    tl.store(old_ptr, tl.atomic_add(total_ptr + 1, 2.0))


def test_atomic_add_of_bf16_returns_what_was_there() -> None:
    total, old = torch.tensor([3.0, 5.0]).bfloat16(), torch.zeros(1, dtype=torch.bfloat16)
    _return_old_bf16[(1,)](total, old)
    assert total.tolist() == [3.0, 7.0]
    assert old.item() == 5.0


@triton.jit
def _helper(x):
    return x + 1


@triton.jit
def _call_helper(out_ptr):
    tl.store(out_ptr, _helper(tl.load(out_ptr)))


def test_device_function_calls_can_be_intercepted() -> None:
    seen = []

    def hook(body, x):
        seen.append(int(x))
        return body(x) * 10

    out = torch.tensor([4])
    interpreter.register_call(_helper, hook)
    _call_helper[(1,)](out)
    assert (out.item(), seen) == (50, [4])
    interpreter.register_call(_helper, lambda body, x: body(x))
    with pytest.raises(ValueError, match="not an interpreted"):
        interpreter.register_call(len, hook)


# Launches.


@triton.jit
def _where_am_i(out_ptr, salt, ROUNDS: tl.constexpr):
    pid = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    total = salt
    for _ in range(ROUNDS):
        total += tl.sum(tl.arange(0, 4) * 0 + tl.program_id(0), axis=0)
    tl.store(out_ptr + pid, total)


def test_threads_may_launch_at_once() -> None:
    failures: list[object] = []

    def work(salt: int) -> None:
        try:
            for rows in (2, 3, 5):
                out = torch.full((rows, 2), -1, dtype=torch.int32)
                _where_am_i[(rows, 2)](out, salt, 6)
                expected = salt + 24 * torch.arange(rows, dtype=torch.int32)[:, None].expand(rows, 2)
                if not torch.equal(out, expected):
                    failures.append((salt, out))
        except BaseException as error:
            failures.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(1000 * i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert failures == []


def test_language_is_as_before_after_a_launch() -> None:
    owners = (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base, tl.dtype)
    during = []

    def look(body, x):
        during.extend(dict(vars(owner)) for owner in owners)
        return body(x)

    interpreter.register_call(_helper, look)
    before = [dict(vars(owner)) for owner in owners]
    _call_helper[(1,)](torch.zeros(1))
    interpreter.register_call(_helper, lambda body, x: body(x))
    assert [dict(vars(owner)) for owner in owners] == before
    assert during != before


@triton.jit
def _wait_for_later(flag, out_ptr):
    if tl.program_id(0) == 0:
        seen = poll(flag, 1)
        while seen < 1:
            seen = poll(flag, 1)
        tl.store(out_ptr, seen)
    else:
        signal(flag, 1)


def test_program_may_wait_for_a_later_one() -> None:
    flag, out = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with interpreter.concurrent_programs(2):
        interpreter.install()  # as a simulator made meanwhile would; changes nothing
        _wait_for_later[(2,)](flag, out)
    assert out.item() == 1


@triton.jit
def _wait_in_vain(flag):
    if tl.program_id(0) == 0:
        seen = poll(flag, 1)
        while seen < 1:
            seen = poll(flag, 1)
    else:
        _trap(flag)


def test_failure_of_one_program_ends_those_that_wait_for_it() -> None:
    flag = torch.zeros(1, dtype=torch.int32)
    with interpreter.concurrent_programs(2), pytest.raises(InterpreterError, match="trap;"):
        _wait_in_vain[(2,)](flag)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("program-")]


def test_at_most_that_many_programs_run_side_by_side() -> None:
    running, most = [], []

    def enter(body, x):
        running.append(1)
        most.append(len(running))
        time.sleep(0.002)
        running.pop()
        return body(x)

    interpreter.register_call(_helper, enter)
    try:
        with interpreter.concurrent_programs(3):
            _call_helper[(8,)](torch.zeros(1))
    finally:
        interpreter.register_call(_helper, lambda body, x: body(x))
    assert 2 <= max(most) <= 3
    with pytest.raises(ValueError, match="concurrent_programs=-1"):
        interpreter.install(-1)


def test_only_an_unsatisfied_poll_gives_the_core_away(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    flag = torch.tensor([2**31 - 1], dtype=torch.int32)
    for wanted, num_pauses in ((2**31 - 1, 0), (5, 0), (-(2**31), 1)):  # the last is the successor of what is there
        pauses.clear()
        _poll_once[(1,)](flag, wanted)
        assert len(pauses) == num_pauses


@triton.jit
def _poll_once(flag, wanted):
    poll(flag, wanted)


@triton.jit
def _write_behind(address, out_ptr):
    # Stands for a peer that writes while the launch runs.
    tl.store(address.to(tl.pointer_type(tl.int64)), 7)
    tl.store(out_ptr, 1)


def test_arguments_on_the_cpu_are_not_written_back(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    original = torch.UntypedStorage.copy_
    monkeypatch.setattr(torch.UntypedStorage, "copy_", lambda *args: (copies.append(1), original(*args))[1])
    memory = torch.zeros(4, dtype=torch.int64)
    _write_behind[(1,)](memory.data_ptr(), memory[1:])
    assert memory.tolist() == [7, 1, 0, 0]
    assert copies == []


@triton.jit
def _call_trap(x_ptr):
    _trap(x_ptr)


def test_error_in_a_device_function_is_told_once() -> None:
    with pytest.raises(InterpreterError) as caught:
        _call_trap[(1,)](torch.zeros(1))
    assert str(caught.value).startswith("_trap: NotImplementedError(")


ADVICE = "set TRITON_INTERPRET=1 before triton or tileflux is first imported"


def test_install_refuses_where_kernels_are_compiled() -> None:
    with env.scoped({"TRITON_INTERPRET": None}), pytest.raises(ValueError, match=ADVICE):
        interpreter.install()


def test_install_refuses_when_the_variable_came_too_late() -> None:
    source = (
        "import os, triton.language; os.environ['TRITON_INTERPRET'] = '1'\n"
        "from tileflux.testing import interpreter; interpreter.install()"
    )
    with env.scoped({"TRITON_INTERPRET": None}):
        done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert f"ValueError: kernels of this process were made to be compiled: {ADVICE}" in done.stderr
