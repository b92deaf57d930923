"""What becomes of ranks' times: merged without flattery, told in a table, a sentence, JSON, CSV and a picture."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tileflux.cli._plot import _colours, _reference, _seconds, plot
from tileflux.cli._report import Measured, Session, as_csv, as_json, labels, merge, sentence, show
from tileflux.perf.figures import CaseResult
from tileflux.testing.bench import BenchCase, RankTimes
from tileflux.testing.shapes import Mixture

PARTS = {"gemm": 10e-3, "comm": 4e-3, "beside": 11e-3}
SESSION = Session("tileflux bench", "2020-02-02T00:00:00+00:00", "cpu", "2 ranks", 2, "A CPU", "", {"torch": "9.9"})


def bench_case(m: int = 512, n: int = 64, k: int = 32, op: str = "ag_gemm") -> BenchCase:
    return BenchCase(op, m, n, k, "float32", ("fused", "auto"), 3)


def times(seconds: Mapping[str, float], *, problem: str = "", auto: str = "fused", **skipped: str) -> RankTimes:
    """Three rounds of 99, 100 and 101 percent: a spread of half a percent."""
    rounds = {name: [value * share for share in (0.99, 1.0, 1.01)] for name, value in (PARTS | dict(seconds)).items()}
    return RankTimes(problem, rounds, skipped, auto)


def measured(seconds: Mapping[int, Mapping[str, float]]) -> list[Measured]:
    """Cases by M on two ranks, of which the first is quicker; times of contenders in ms."""
    cases = [bench_case(m) for m in seconds]
    slow = [times({name: 1e-3 * value for name, value in each.items()}) for each in seconds.values()]
    quick = [RankTimes("", {name: [0.5 * v for v in rounds] for name, rounds in each.rounds.items()}, {}, "fused")
             for each in slow]  # fmt: skip
    return merge(cases, 2, [quick, slow])


def results(seconds: Mapping[int, Mapping[str, float]]) -> list[CaseResult]:
    return [each.result for each in measured(seconds) if each.result is not None]


def shown(cases: Sequence[Measured]) -> str:
    file = io.StringIO()
    show(Console(file=file, width=80, highlight=False), cases)
    return file.getvalue()


def test_merging_takes_the_slowest_rank_and_orders_the_contenders() -> None:
    (each,) = measured({512: {"ours fused": 11.0, "torch": 12.0, "ours auto": 11.5, "sequential": 14.0}})
    result = each.result
    assert result is not None
    assert [timing.name for timing in result.contenders] == ["sequential", "torch", "ours fused", "ours auto"]
    assert [timing.seconds for timing in result.contenders] == pytest.approx([14e-3, 12e-3, 11e-3, 11.5e-3])
    assert result.gemm.seconds == pytest.approx(10e-3) and result.comm is not None
    assert each.rounds["ours fused"][0] == [0.5 * value for value in each.rounds["ours fused"][1]]
    assert (result.world_size, result.auto, result.m) == (2, "fused", 512)


def test_a_problem_on_any_rank_leaves_no_time() -> None:
    good = times({"sequential": 14e-3})
    bad = times({"sequential": 14e-3}, problem="ours fused: rank 1: all wrong")
    (each,) = merge([bench_case()], 2, [[good], [bad]])
    assert each.result is None and each.problems == ("ours fused: rank 1: all wrong",) and not each.rounds


def test_a_contender_counts_only_if_every_rank_timed_it() -> None:
    first, second = times({"sequential": 14e-3, "torch": 1e-3}), times({"sequential": 14e-3}, pipelined="no room")
    (each,) = merge([bench_case()], 2, [[first], [second]])
    assert each.result is not None
    assert [timing.name for timing in each.result.contenders] == ["sequential"]
    assert dict(each.result.skipped) == {"torch": "not timed on every rank", "pipelined": "no room"}


def test_parts_that_took_no_time_are_not_there() -> None:
    alone = RankTimes("", {"gemm": [1.0], "comm": [0.0], "beside": [0.0], "torch": [1.0], "ours": [2.0]}, {}, "")
    (each,) = merge([bench_case(op="gemm")], 1, [[alone]])
    assert each.result is not None and each.result.comm is None and each.result.beside is None
    output = shown([each])
    assert "hidden" not in output and "ECT" not in output and "T_comm" not in output and "limit" not in output
    assert re.search(r"^ours +2000\.0 +0\.50x +0\.0%$", output, re.MULTILINE), output
    assert sentence([each.result]) == "ours loses to torch by 100 %: 0.50x over torch."


def test_the_table() -> None:
    output = shown(measured({512: {"sequential": 14.0, "pipelined": 12.4, "ours fused": 11.0, "ours auto": 120.0}}))
    assert max(len(line) for line in output.splitlines()) <= 80
    lines = [line.rstrip() for line in output.splitlines()]
    assert "ag_gemm 512 x 64 x 32 (auto takes fused)" in lines
    assert "T_gemm 10.00 ms, T_comm 4.00 ms, T_beside 11.00 ms, limit 10.00 ms" in lines
    cells = {line.split("  ")[0]: line.split()[-7:] for line in lines if line.endswith("0.5%")}
    assert cells["sequential"] == ["14.000", "4.000", "0.0%", "71%", "1.00x", "0.89x", "0.5%"]
    assert cells["pipelined"] == ["12.400", "2.400", "40%", "81%", "1.13x", "1.00x", "0.5%"]
    assert cells["ours fused"] == ["11.000", "1.000", "75%", "91%", "1.27x", "1.13x", "0.5%"]
    assert cells["ours auto"] == ["120.0", "110.0", "-2650%", "8.3%", "0.12x", "0.10x", "0.5%"]


def test_torchs_ways_have_a_row_each_and_over_torch_is_over_the_quicker() -> None:
    ways = {"sequential": 14.0, "ours fused": 11.0, "torch one-shot": 13.2, "torch two-shot": 12.1, "pipelined": 12.4}
    cases = measured({512: ways})
    output = shown(cases)
    rows = [re.split(r"  +", line.strip()) for line in output.splitlines() if line.rstrip().endswith("0.5%")]
    assert {row[0]: row[-2] for row in rows} == {
        "sequential": "0.86x", "pipelined": "0.98x", "torch one-shot": "0.92x", "torch two-shot": "1.00x",
        "ours fused": "1.10x",
    }  # fmt: skip
    assert [row[0] for row in rows] == [
        "sequential", "pipelined", "torch one-shot", "torch two-shot", "ours fused",
    ]  # fmt: skip
    said = "ours fused wins: 1.27x over sequential, 1.13x over pipelined, 1.10x over torch."
    report = as_json(SESSION, cases)
    assert report["summary"] == said
    over = {each["name"]: each["over_torch"] for each in report["cases"][0]["contenders"]}
    assert over["ours fused"] == pytest.approx(1.1) and over["torch one-shot"] == pytest.approx(12.1 / 13.2)
    lost = results({512: ways | {"ours fused": 12.5}})
    assert sentence(lost).startswith("ours fused loses to torch two-shot by 3 %: ")


def test_a_shape_at_which_one_of_torchs_ways_was_skipped_is_over_the_other() -> None:
    first = times({"sequential": 14e-3, "torch one-shot": 13e-3, "ours fused": 10e-3})
    skipped = dataclasses.replace(first, skipped={"torch two-shot": "no room"})
    (each,) = merge([bench_case(op="gemm_ar")], 1, [[skipped]])
    assert each.result is not None and each.result.over("torch", each.result.contenders[-1]) == pytest.approx(1.3)
    assert "torch two-shot: skipped, no room" in shown([each])


def test_long_names_and_large_numbers_are_not_cut() -> None:
    output = shown(measured({8192: {"sequential": 123_456.0, "ours sequential": 100.0, "ours pipelined": 0.0213}}))
    assert "…" not in output
    assert all(text in output for text in ("123456", " 0.021 ", "<-9999%", ">999%", ">999x"))
    assert max(len(line) for line in output.splitlines()) <= 80


def test_a_sweep_has_one_heading_and_lines_up() -> None:
    output = shown(measured({m: {"sequential": 14.0, "ours fused": float(m)} for m in (1, 20, 3000)}))
    lines = output.splitlines()
    assert sum("spread" in line and "what" in line for line in lines) == 1
    assert len({line.index("%") for line in lines if line.startswith("ours fused")}) == 1
    assert len({len(line) for line in lines if line.startswith(("ours", "sequential"))}) == 1
    assert [line.split()[1] for line in lines if line.startswith("ag_gemm")] == ["1", "20", "3000"]


def test_a_wrong_case_says_so_and_shows_no_number_of_it() -> None:
    bad = Measured(bench_case(7), None, ("ours fused: rank 1: [red] is off",), {})
    output = shown([bad, *measured({512: {"sequential": 14.0}})])
    (line,) = (line for line in output.splitlines() if "7 x 64 x 32" in line)
    assert line.endswith("WRONG, so no times: ours fused: rank 1: [red] is off")
    assert output.index("spread") > output.index("WRONG") and "ms" not in line
    assert "spread" not in shown([bad])


def test_what_was_skipped_is_told_with_why_and_where() -> None:
    cases = [bench_case(1), bench_case(2)]
    first = times({"sequential": 1.0}, torch="no GPU", pipelined="too [small]")
    second = times({"sequential": 1.0, "pipelined": 2.0}, torch="no GPU")
    output = shown(merge(cases, 1, [[first, second]]))
    assert "torch: skipped, no GPU\n" in output
    assert "pipelined: skipped, too [small] (at M=1)\n" in output


def test_where_auto_could_have_known_better() -> None:
    both = {"sequential": 20.0, "ours fused": 12.0, "ours sequential": 10.0}
    assert "auto takes fused at M=1, and 20 % longer than ours sequential." in shown(
        measured({1: both | {"ours auto": 12.0}, 2: both | {"ours auto": 10.02}})
    )
    assert "longer than" not in shown(measured({2: both | {"ours auto": 10.02}}))
    # What auto takes is fused itself: a difference between the two is noise, whatever the numbers say.
    assert "longer than" not in shown(measured({1: {"ours fused": 10.0, "ours auto": 13.0}}))


def test_labels_name_what_differs() -> None:
    assert labels([bench_case(1), bench_case(2)]) == ["M=1", "M=2"]
    assert labels([bench_case(1, 5), bench_case(1, 6)]) == ["N=5", "N=6"]
    assert labels([bench_case(1, 5), bench_case(2, 6)]) == ["M=1 N=5", "M=2 N=6"]
    assert labels([bench_case(1, 2, 3)]) == ["M=1 N=2 K=3"]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ({"sequential": 13.1, "pipelined": 11.0, "ours fused": 10.0},
         "ours fused wins: 1.31x over sequential, 1.10x over pipelined."),
        ({"sequential": 11.2, "pipelined": 10.0, "ours fused": 10.4},
         "ours fused loses to pipelined by 4 %: 1.08x over sequential, 0.96x over pipelined."),
        ({"sequential": 11.0, "torch": 10.04, "ours fused": 10.0},
         "ours fused is level with torch, within what rounds differ: 1.10x over sequential, 1.00x over torch."),
        ({"sequential": 11.0}, "Nothing of ours was timed, so there is nothing to compare."),
    ],
)  # fmt: skip
def test_the_sentence_of_one_shape(seconds: dict[str, float], said: str) -> None:
    assert sentence(results({512: seconds})) == said


def test_the_sentence_of_a_sweep() -> None:
    swept = {m: {"sequential": 12.0, "pipelined": 11.0, "ours fused": 12.0 / speedup}
             for m, speedup in ((512, 1.05), (1024, 1.2), (2048, 1.25), (4096, 1.5))}  # fmt: skip
    assert sentence(results(swept)) == (
        "ours fused wins 3 of 4 shapes; 1.24x over sequential in the geometric mean (1.05 to 1.50); loses to pipelined "
        "at M=512 by 4 %."
    )
    swept[512]["ours fused"] = 11.01
    assert "ours fused wins 3 of 4 shapes, and is level with the quickest baseline at 1; 1.25x" in sentence(
        results(swept)
    )


def test_the_sentence_of_a_defeat_names_the_worst() -> None:
    swept = {m: {"sequential": 10.0, "pipelined": 20.0, "ours fused": 10.0 + m} for m in range(1, 6)}
    swept[4] = {"sequential": 20.0, "pipelined": 10.0, "ours fused": 14.0}
    assert sentence(results(swept)).endswith(
        "; loses to sequential at M=5 by 50 %, M=3 by 30 %, to pipelined at M=4 by 40 %, and at 2 more."
    )
    assert sentence(results(swept)).startswith("ours fused wins none of 5 shapes; 0.")


def check_json(report: dict[str, Any]) -> None:
    """The promised fields."""
    top = {"ok", "command", "date", "where", "world", "world_size", "device", "link", "versions", "summary", "cases"}
    assert set(report) == top
    for case in report["cases"]:
        assert {"op", "m", "n", "k", "dtype", "strategies", "num_rounds", "problems"} <= set(case)
        if not case["problems"]:
            assert set(case["parts"]) == {"gemm", "comm", "beside"}
            for contender in case["contenders"]:
                assert {"name", "seconds", "spread", "ect", "hidden", "limit_share", "rounds"} <= set(contender)
                assert {"over_sequential", "over_pipelined", "over_torch"} <= set(contender)


def test_json_has_everything() -> None:
    bad = Measured(bench_case(7), None, ("off",), {})
    good = measured({512: {"sequential": 14.0, "ours fused": 11.0}})
    report = json.loads(json.dumps(as_json(SESSION, [*good, bad])))
    check_json(report)
    assert report["ok"] is False and as_json(SESSION, good)["ok"] is True
    assert report["summary"] == "ours fused wins: 1.27x over sequential."
    first, second = report["cases"]
    assert second["problems"] == ["off"] and "contenders" not in second
    fused = first["contenders"][1]
    assert fused["name"] == "ours fused"
    assert fused["seconds"] == pytest.approx(11e-3) and fused["ect"] == pytest.approx(1e-3)
    assert fused["hidden"] == pytest.approx(0.75) and fused["limit_share"] == pytest.approx(10 / 11)
    assert fused["over_sequential"] == pytest.approx(14 / 11) and fused["over_torch"] is None
    assert fused["rounds"][1] == pytest.approx([10.89e-3, 11e-3, 11.11e-3]) and len(fused["rounds"]) == 2
    assert first["parts"]["comm"]["seconds"] == pytest.approx(4e-3) and first["limit"] == pytest.approx(10e-3)


def test_csv_has_a_line_per_shape_and_contender() -> None:
    bad = Measured(bench_case(7), None, ("off",), {})
    cases = measured({m: {"sequential": 14.0, "ours fused": 11.0} for m in (512, 1024)})
    rows = list(csv.DictReader(io.StringIO(as_csv(SESSION, [*cases, bad]))))
    assert [(row["m"], row["contender"]) for row in rows] == [
        (m, name) for m in ("512", "1024") for name in ("sequential", "ours fused")
    ]
    row = rows[1]
    assert (row["op"], row["n"], row["k"], row["dtype"], row["world_size"]) == ("ag_gemm", "64", "32", "float32", "2")
    wanted = {"seconds": 11e-3, "gemm": 10e-3, "comm": 4e-3, "beside": 11e-3, "limit": 10e-3, "ect": 1e-3,
              "hidden": 0.75, "over_sequential": 14 / 11}  # fmt: skip
    assert {name: float(row[name]) for name in wanted} == pytest.approx(wanted)
    assert row["over_torch"] == ""
    assert as_csv(SESSION, [bad]) == "op\n"


@pytest.mark.parametrize("shapes", [[(512, 64)], [(512, 64), (1024, 64), (4096, 64)], [(512, 64), (512, 32), (64, 64)]])
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture(shapes: list[tuple[int, int]], suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cases = [bench_case(m, n) for m, n in shapes]
    names = ("sequential", "pipelined", "torch one-shot", "torch two-shot", "ours fused", "ours auto")
    ranks = [[times({name: random.uniform(1e-3, 2e-3) for name in names}) for _ in cases]]
    found = [each.result for each in merge(cases, 1, ranks) if each.result is not None]
    file = tmp_path / f"picture.{suffix}"
    plot(found, "1 rank, A CPU", file)
    content = file.read_bytes()
    assert content.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")
    assert len(content) > 5000


def test_in_a_picture_every_line_has_its_colour() -> None:
    names = ["sequential", "pipelined", "torch one-shot", "torch two-shot", "torch multimem", "ours fused", "ours auto"]
    colours = _colours(names)
    assert len(set(colours.values())) == len(names) == len(colours)
    assert _colours(["torch", "ours fused"]) == {
        "torch": colours["torch one-shot"],
        "ours fused": colours["ours fused"],
    }
    slow, quick = {"torch one-shot": 3.0, "torch two-shot": 2.0}, {"torch one-shot": 1.0}
    found = results({1: slow | {"ours fused": 1.0}, 2: quick | {"ours fused": 1.0}})
    assert _reference(found) == "torch" and _seconds(found[0], "torch") == pytest.approx(2e-3)


def test_a_picture_of_sizes_without_a_common_baseline(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(results({1: {"sequential": 1.0, "ours fused": 2.0}, 2: {"torch": 1.0}}), "", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5000


def test_it_says_how_many_rounds_there_were_and_what_is_still_unsteady() -> None:
    def case(num_rounds: int, noise: float, wanted: int | None) -> Measured:
        rounds = [value * (1 + noise * (index % 2)) for index, value in enumerate([1e-3] * num_rounds)]
        made = RankTimes("", dict.fromkeys((*PARTS, "sequential", "ours fused"), rounds), {}, "fused")
        asked = BenchCase("ag_gemm", num_rounds, 8, 8, "float32", ("fused",), wanted)
        return merge([asked], 1, [[made]])[0]

    text = " ".join(shown([case(20, 0.0, None), case(100, 0.5, None)]).split())
    assert "total: median over 20 to 100 rounds of the slowest rank." in text
    # Two halves half apart: 1.2533 * 0.7413 * 0.5 / 1.25 / 10.
    note = "Medians not known to 1 % after 100 rounds, by their standard error: "
    assert note + "sequential at M=100 (3.7%), ours fused at M=100 (3.7%)." in text and "at M=20" not in text
    text = " ".join(shown([case(7, 0.5, 7)]).split())
    assert "total: median over 7 rounds of" in text and "not known" not in text, "as many as were asked for"
    assert "over 1 round of" in " ".join(shown([case(1, 0.0, 1)]).split())
    report = as_json(SESSION, [case(25, 0.0, None)])["cases"][0]
    assert report["num_rounds"] == 25
    (row, _) = csv.DictReader(io.StringIO(as_csv(SESSION, [case(25, 0.0, None)])))
    assert row["num_rounds"] == "25"


def test_of_several_products_the_mean_and_the_worst_are_told_by_shape() -> None:
    def product(m: int, n: int, torch_ms: float, ours_ms: float) -> Measured:
        rounds = {name: [1e-3 * each * share for share in (0.99, 1.0, 1.01)]
                  for name, each in (("gemm", torch_ms), ("torch", torch_ms), ("ours", ours_ms))}  # fmt: skip
        missing = {name: [0.0] * 3 for name in ("comm", "beside")}
        asked = BenchCase("gemm", m, n, 64, "bfloat16", (), 3)
        return merge([asked], 1, [[RankTimes("", rounds | missing, {}, "")]])[0]

    def said(*products: Measured) -> str:
        return sentence([each.result for each in products if each.result is not None])

    slow, level, quick = product(512, 64, 0.8, 1.0), product(4096, 64, 1.0, 1.0), product(8192, 64, 1.6, 1.0)
    # The cube root of 0.8 * 1 * 1.6.
    assert said(slow, level, quick) == (
        "ours is 1.09x as quick as torch.mm in the geometric mean of 3 shapes, from 0.80x at M=512 to 1.60x at M=8192; "
        "it wins 1, is level at 1, loses 1."
    )
    wide = product(512, 128, 0.9, 1.0)
    assert said(slow, wide) == (
        "ours is 0.85x as quick as torch.mm in the geometric mean of 2 shapes, from 0.80x at N=64 to 0.90x at N=128; "
        "it loses 2."
    )
    assert said(slow) == "ours loses to torch by 25 %: 0.80x over torch."


def test_cases_of_one_shape_are_told_apart_by_their_experts() -> None:
    mixtures = [Mixture(32, 4), Mixture(8, 2)]
    cases = [BenchCase("moe_ag_gemm", 64, 8, 8, "float32", ("fused",), 3, mixture) for mixture in mixtures]
    assert labels(cases) == ["E=32 top=4", "E=8 top=2"] and labels(cases[:1]) == ["M=64 N=8 K=8"]
    larger = dataclasses.replace(cases[1], m=128)
    assert labels([cases[0], larger]) == ["M=64 E=32 top=4", "M=128 E=8 top=2"]
    assert labels([cases[1], larger]) == ["M=64", "M=128"]
    took = [times({"route": 2e-3, "sequential": 14e-3, "ours fused": each}) for each in (11e-3, 15e-3)]
    found = merge(cases, 1, [took])
    results = [each.result for each in found if each.result is not None]
    assert [result.variant for result in results] == ["E=32 top=4", "E=8 top=2"]
    assert [result.route and result.route.seconds for result in results] == [pytest.approx(2e-3)] * 2
    assert [timing.name for timing in results[0].contenders] == ["sequential", "ours fused"], "what is apart is not one"
    output = shown(found)
    assert "moe_ag_gemm 64 x 8 x 8, E=8 top=2 (auto takes fused)" in output
    assert output.count("T_beside 11.00 ms, limit 10.00 ms; T_route 2.00 ms") == 2
    assert "T_route: what makes the routing, which everybody here is given." in " ".join(output.split())
    assert sentence(results).endswith("; loses to sequential at E=8 top=2 by 7 %.")
    report = as_json(SESSION, found)["cases"]
    assert report[0]["parts"]["route"]["seconds"] == pytest.approx(2e-3) and report[1]["mixture"]["num_experts"] == 8
    rows = list(csv.DictReader(io.StringIO(as_csv(SESSION, found))))
    assert [row["variant"] for row in rows] == ["E=32 top=4"] * 2 + ["E=8 top=2"] * 2
    assert all(float(row["route"]) == pytest.approx(2e-3) for row in rows)
    assert "T_route" not in shown(measured({512: {"sequential": 14.0, "ours fused": 11.0}}))


def test_a_picture_of_cases_that_differ_in_their_experts_alone(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cases = [BenchCase("moe_ag_gemm", 64, 8, 8, "float32", (), 3, Mixture(experts, 2)) for experts in (4, 8)]
    found = merge(cases, 1, [[times({"sequential": 14e-3, "ours fused": 11e-3}) for _ in cases]])
    plot([each.result for each in found if each.result is not None], "", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5000
