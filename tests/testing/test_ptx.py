from __future__ import annotations

import pytest

from tileflux.testing.ptx import Function, Instruction, parse, reach

HEADER = ".version 8.7\n.target sm_90a\n.visible .entry kernel(\n\t.param .u64 kernel_param_0\n)\n.reqntid 128\n"


def function(body: str) -> Function:
    (only,) = parse(f"{HEADER}{{\n{body}\n}}\n")
    return only


def edges(body: str) -> dict[str, list[str]]:
    """Opcode to opcodes that may follow, for bodies in which each opcode appears once."""
    parsed = function(body)
    names = [instruction.opcode for instruction in parsed.instructions]
    return {names[index]: [names[after] for after in following] for index, following in enumerate(parsed.successors)}


def instruction(text: str) -> Instruction:
    (only,) = function(text).instructions
    return only


def test_instruction_fields() -> None:
    parsed = instruction("\t@!%p3 ld.global.sys.acquire.b32 \t%r8, [ %rd2 + 0 ];")
    assert (parsed.guard, parsed.opcode, parsed.operands) == ("@!%p3", "ld.global.sys.acquire.b32", "%r8, [ %rd2 + 0 ]")
    assert parsed.address == "%rd2"


def test_lines_are_those_of_the_text() -> None:
    text = HEADER + "{\n\t.loc 1 2 3 // a.py:2; }\n// one ; two {\n/* three\n four; */\n$L__tmp0:\n\n\tbar.sync 0;\n}\n"
    (parsed,) = parse(text)
    (barrier,) = parsed.instructions
    assert text.splitlines()[barrier.line - 1] == "\tbar.sync 0;"


def test_inline_asm_block_holds_several_instructions() -> None:
    parsed = function(
        "{ .reg .pred first; .reg .u32 tid; mov.u32 tid, %tid.x; setp.eq.u32 first, tid, 0; "
        "@first st.release.sys.global.s32 [%rd1], %r2; mov.s32 %r3, 0; }\nret;"
    )
    assert [i.opcode for i in parsed.instructions] == [
        "mov.u32",
        "setp.eq.u32",
        "st.release.sys.global.s32",
        "mov.s32",
        "ret",
    ]
    assert parsed.instructions[2].guard == "@first"


def test_register_vectors_are_not_blocks() -> None:
    parsed = function("st.global.v4.b32 [ %rd1 + 0 ], { %r1, %r2, %r3, %r4 };\nmov.b64 \t{_, %r5}, %rd2;\nret;")
    assert [i.opcode for i in parsed.instructions] == ["st.global.v4.b32", "mov.b64", "ret"]
    assert parsed.instructions[0].operands.endswith("{ %r1, %r2, %r3, %r4 }")


def test_label_directly_before_a_block() -> None:
    assert edges("$L__BB0_1:\n$L__tmp2:\n{ mov.u32 %r1, 0; }\nbra.uni $L__BB0_1;")["bra.uni"] == ["mov.u32"]


def test_branches() -> None:
    followers = edges("mov.u32 %r1, 0;\n@%p1 bra $L__A;\nbar.sync 0;\nret;\n$L__A:\n@%p2 exit;\ntrap;")
    assert followers == {
        "mov.u32": ["bra"],
        "bra": ["exit", "bar.sync"],
        "bar.sync": ["ret"],
        "ret": [],
        "exit": ["trap"],
        "trap": [],
    }


def test_branch_table() -> None:
    followers = edges(
        "$L_brx_0: .branchtargets\n\t\t$L__A,\n\t\t$L__B;\nbrx.idx %r1, $L_brx_0;\n$L__A:\nret;\n$L__B:\nexit;"
    )
    assert followers["brx.idx"] == ["ret", "exit"]


def test_two_blocks_may_use_one_label() -> None:
    parsed = function("{ spin: add.u32 %r1, %r1, 1; @%p1 bra spin; }\n{ spin: sub.u32 %r1, %r1, 1; @%p1 bra spin; }")
    assert parsed.successors == [[1], [0, 2], [3], [2]]


def test_branch_out_of_a_block() -> None:
    assert edges("{ @%p1 bra $L__END; }\nmov.u32 %r1, 0;\n$L__END:\nret;")["bra"] == ["ret", "mov.u32"]


def test_label_at_the_end_leads_nowhere() -> None:
    assert edges("@%p1 bra $L__END;\nmov.u32 %r1, 0;\n$L__END:")["bra"] == ["mov.u32"]


def test_unreachable_code_is_left_out() -> None:
    parsed = function("ret;\nbar.sync 0;\nexit;")
    assert parsed.reachable == [0]
    assert parsed.predecessors == [[], [], []]


def test_several_functions_and_declarations() -> None:
    text = (
        ".extern .func  (.param .b32 func_retval0) vprintf\n(\n\t.param .b64 vprintf_param_0\n)\n;\n"
        ".func  (.param .b32 func_retval0) helper(\n\t.param .b32 helper_param_0\n)\n{\n\tret;\n}\n"
        ".visible .entry kernel()\n.reqntid 32\n{\n\tbar.warp.sync -1;\n\tret;\n}\n"
    )
    helper, kernel = parse(text)
    assert (helper.name, kernel.name) == ("helper", "kernel")
    assert not helper.one_warp
    assert kernel.one_warp and kernel.is_barrier(0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not PTX at all", "no .entry or .func"),
        (HEADER + "{ ret;", "ends inside a function"),
        (HEADER + "{ bra $L__NOWHERE; }", "PTX line 7.*label that is not there"),
        (HEADER + "{ <garbage>; }", "PTX line 7 is not an instruction"),
    ],
)
def test_what_is_not_ptx_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bar.sync 0;", True),
        ("bar.sync 1, 128;", True),
        ("barrier.sync.aligned 0;", True),
        ("barrier.cta.sync.aligned.all 0;", True),
        ("bar.red.popc.u32 %r1, 0, %p1;", True),
        ("barrier.cluster.wait.aligned;", True),
        ("barrier.cluster.arrive.aligned;", False),
        ("bar.arrive 1, 128;", False),
        ("bar.warp.sync -1;", False),
        ("@%p1 bar.sync 0;", False),
        ("mbarrier.arrive.shared::cta.b64 _, [%r1];", False),
    ],
)
def test_barrier(text: str, expected: bool) -> None:
    assert function(text).is_barrier(0) is expected


PROPERTIES = ("acquires", "releases", "polls_without_order", "stores_data", "loads_data", "is_fence")


@pytest.mark.parametrize(
    ("text", "expected", "scope"),
    [
        ("ld.global.sys.acquire.b32 %r1, [%rd1];", {"acquires"}, "sys"),
        ("ld.acquire.gpu.b32 %r1, [%rd1];", {"acquires"}, "gpu"),
        ("ld.acquire.cta.shared::cta.b32 %r1, [%r1];", set(), "cta"),
        ("ld.relaxed.sys.global.b32 %r1, [%rd1];", {"polls_without_order"}, "sys"),
        ("ld.volatile.global.b32 { %r1 }, [ %rd7 + 0 ];", {"polls_without_order"}, "gpu"),
        ("ld.global.nc.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];", {"loads_data"}, "gpu"),
        ("ld.b32 %r1, [%rd1];", {"loads_data"}, "gpu"),
        ("ld.shared.b32 %r1, [global_smem];", set(), "gpu"),
        ("ld.param.b64 %rd1, [kernel_param_0];", set(), "gpu"),
        ("cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, 0x10;", {"loads_data"}, "gpu"),
        ("multimem.ld_reduce.relaxed.sys.global.add.v4.bf16x2 {%r1,%r2,%r3,%r4}, [%rd1];", {"loads_data"}, "sys"),
        ("multimem.st.relaxed.sys.global.b32 [%rd1], %r1;", {"stores_data"}, "sys"),
        ("st.global.v4.b32 [ %rd1 + 0 ], { %r1, %r2, %r3, %r4 };", {"stores_data"}, "gpu"),
        ("st.b32 [%rd1], %r1;", {"stores_data"}, "gpu"),
        ("st.shared::cta.b32 [%r1], %r2;", set(), "gpu"),
        ("st.release.sys.global.s32 [%rd1], %r1;", {"releases"}, "sys"),
        ("atom.global.acq_rel.sys.cas.b32 %r1, [ %rd1 + 0 ], %r2, %r3;", {"acquires", "releases"}, "sys"),
        ("atom.global.relaxed.gpu.add.f32 %r1, [%rd1], %r2;", {"polls_without_order", "stores_data"}, "gpu"),
        ("red.release.sys.global.add.u32 [%rd1], 1;", {"releases"}, "sys"),
        ("red.global.add.f32 [%rd1], %r2;", {"stores_data"}, "gpu"),
        ("fence.acq_rel.sys;", {"is_fence"}, "sys"),
        ("fence.sc.gpu;", {"is_fence"}, "gpu"),
        ("membar.sys;", {"is_fence"}, "sys"),
        ("membar.gl;", {"is_fence"}, "gpu"),
        ("fence.proxy.async.global;", set(), "gpu"),
        ("fence.mbarrier_init.release.cluster;", set(), "cluster"),
        ("mbarrier.arrive.release.cta.shared::cta.b64 _, [%r1];", set(), "cta"),
        ("call.uni (retval0), helper, (param0);", {"loads_data", "stores_data"}, "gpu"),
    ],
)
def test_what_an_instruction_does(text: str, expected: set[str], scope: str) -> None:
    parsed = instruction(text)
    assert {name for name in PROPERTIES if getattr(parsed, name)} == expected
    assert parsed.memory_scope == scope


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd2, {%r3, %r3}], [%r2];", {"is_bulk_store"}),
        ("cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r2], 64;", {"is_bulk_store"}),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd2], [%r2], 64;", {"is_bulk_store"}),
        (
            "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [%r8], [%rd1, {%r1}], [%r3];",
            {"is_bulk_load"},
        ),
        ("cp.async.bulk.wait_group 0;", {"is_bulk_wait", "is_full_bulk_wait"}),
        ("cp.async.bulk.wait_group 1;", {"is_bulk_wait"}),
        ("cp.async.bulk.wait_group.read 0;", {"is_bulk_wait"}),
        ("cp.async.bulk.commit_group;", set()),
        ("cp.async.wait_group 0;", set()),
    ],
)
def test_what_a_bulk_instruction_does(text: str, expected: set[str]) -> None:
    names = ("is_bulk_store", "is_bulk_load", "is_bulk_wait", "is_full_bulk_wait")
    parsed = instruction(text)
    assert {name for name in names if getattr(parsed, name)} == expected
    assert parsed.stores_data is ("is_bulk_store" in expected)
    assert not parsed.loads_data


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("add.s64 %rd1, %rd2, 8;", True),
        ("mov.b64 {%r3, %rd1}, %rd5;", True),
        ("add.s64 %rd10, %rd1, 8;", False),
        ("st.global.b64 [ %rd1 + 0 ], %rd2;", False),
        ("bar.sync 0;", False),
    ],
)
def test_writes_register(text: str, expected: bool) -> None:
    assert instruction(text).writes_register("%rd1") is expected


def test_reach_meets_but_does_not_pass() -> None:
    line = [[1], [2], [3], []]
    assert reach([0], line) == {1, 2, 3}
    assert reach([0], line, lambda index: index == 2) == {1, 2}
    assert reach([0], [[1], [0]]) == {0, 1}
