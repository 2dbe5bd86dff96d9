"""Known findings: what identifies them, their file, and how campaigns tell them from new ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from torch import fx

from tcverify.application import InProcess, PassFacts
from tcverify.application.loading import prepare_pass
from tcverify.campaign import Campaign, CampaignFinished, CampaignPlan, Statistics
from tcverify.cases.baseline import Baseline, KnownFinding, known_of, read_baseline, write_baseline
from tcverify.cases.counterexample import read_counterexample
from tcverify.cases.fingerprint import MAX_LENGTH, fingerprint, fingerprint_of
from tcverify.errors import UsageError
from tcverify.program import Finding, GraphBuilder, Program, spmd_program
from tcverify.report.known_findings import baseline_lines
from tcverify.strategies import transformer_programs
from tests.cases.test_counterexample import some_case
from tests.mutants.sequence_parallel import FirstChunkForAll
from tests.support.programs import TP2, X, reduce_then_norm


def chain(*ops: str) -> Program:
    """all_reduce, then these ops of one operand."""

    def build(b: GraphBuilder) -> object:
        value = b.call("tensor_cast::all_reduce", b.input("x"), b.rank, b.group("tp"))
        for op in ops:
            value = b.call(op, value)
        return value

    return spmd_program(TP2, [X], build)


BOTH = chain("aten::neg", "aten::abs")


# -------------------------------------------------------------------------------------------------------- fingerprints


def told(title: str, program: Program = BOTH, rewritten: Program | None = None, **facts: Any) -> str:
    finding = Finding(**{"kind": "stale-metadata", "check": "metadata", "title": title, **facts})
    return fingerprint(program, rewritten, finding)


def test_numbers_and_names_of_nodes_do_not_matter() -> None:
    assert told("meta of 'neg' says float32[2, 4] on ranks 0, 1") == told("meta of 'neg' says float32[8] on rank 3")
    assert told("'neg' is wrong") == "'neg' is wrong"
    assert told("'x' is wrong") == "'input' is wrong"
    assert told("'neg' is wrong") != told("'abs_1' is wrong")


def test_forms_of_one_op_are_one() -> None:
    assert told("'rms_norm' is stale", reduce_then_norm()) == "'norm' is stale"


def test_to_streams_it_matters_what_an_op_does() -> None:
    race: dict[str, Any] = {"kind": "race", "check": "happens-before"}
    assert told("'neg' is read early", **race) == told("'abs_1' is read early", **race) == "'op' is read early"
    assert told("'all_reduce' is read early", **race) == "'collective' is read early"


def test_to_memory_in_use_it_matters_what_an_op_does() -> None:
    race: dict[str, Any] = {"kind": "async-race", "check": "order"}
    one, other = (
        told(f"'{name}' writes into 'x' while 'all_reduce' may still read it", **race) for name in ("neg", "abs_1")
    )
    assert one == other == "'op' writes into 'input' while 'collective' may still read it"
    assert told("'neg' writes into 'x', which 'all_reduce' writes", **race) != one


def test_the_node_to_blame_belongs_to_it() -> None:
    assert told("a graph is malformed", node="neg") == "a graph is malformed, at neg"
    assert told("a graph is malformed", node="no such node") == "a graph is malformed, at a node"
    assert told("'neg' is malformed", node="neg") == "'neg' is malformed"


def test_where_ranks_call_different_collectives_it_does_not_matter_which() -> None:
    def mismatch(title: str) -> str:
        return told(title, kind="collective-mismatch", check="collectives", node="all_reduce", rank=0)

    one = mismatch("ranks disagree: rank 0 calls all_reduce while rank 1 calls all_gather")
    assert one == mismatch("ranks disagree: rank 2 calls reduce_scatter while rank 3 calls all_reduce")
    assert one == "ranks disagree: ranks call different ops"
    assert one != mismatch("ranks disagree: in all_gather, rank 0 works on dim 0 while rank 1 works on dim 1")


def test_the_stage_of_a_pipeline_belongs_to_it() -> None:
    first = told("stale (stage first)", data={"stage": "first"})
    assert first == "stale; stage first"
    assert first != told("stale (stage second)", data={"stage": "second"})


def test_the_first_divergence_says_what_is_wrong_with_values() -> None:
    wrong: dict[str, Any] = {"kind": "wrong-value", "check": "equivalence", "rank": 0}
    one = told(
        "output 0 is wrong on rank 0", chain("aten::neg"), chain("aten::exp"), data={"label": "output 0"}, **wrong
    )
    two = told(
        "output 0 is wrong on ranks 0, 1",
        chain("aten::abs", "aten::neg"),
        chain("aten::abs", "aten::exp"),
        data={"label": "output 0"},
        **wrong,
    )
    assert one == two == "exp is unrelated"


TRACEBACK = """Traceback (most recent call last):
  File "/home/me/passes.py", line {line}, in __call__
    self.fuse(node)
  File "/home/me/passes.py", line 44, in {function}
    gm.graph.lint()
  File "/venv/lib/python3.11/site-packages/torch/fx/graph.py", line 1, in lint
    raise ValueError
"""


def test_of_a_pass_that_raises_it_is_the_function_and_the_message() -> None:
    def raised(message: str, function: str = "fuse", line: int = 3) -> str:
        title = f"the pass raised ValueError: {message} on the graph of rank {line % 2}"
        detail = TRACEBACK.format(line=line, function=function)
        return told(title, kind="pass-raised", check="application", detail=detail)

    assert raised("no idea what neg is") == "the pass raised ValueError: no idea what neg is, in fuse"
    assert raised("size 3 of all_reduce") == raised("size 4 of all_reduce", line=8)
    assert raised("no idea what neg is") != raised("no idea what neg is", "split")
    assert raised("no idea") != raised("no way")
    assert raised("'arg2_1' is not there") == raised("'arg10_1' is not there") != raised("'buf2' is not there")
    assert raised("bfloat16 is none of float32") != raised("bfloat16 is none of float64")


def test_of_an_installed_pass_that_raises_it_is_the_innermost_function() -> None:
    installed = TRACEBACK.replace("/home/me", "/venv/lib/python3.11/site-packages")
    detail = installed.format(line=3, function="fuse")
    text = told(
        "the pass raised ValueError on the graph of rank 0", kind="pass-raised", check="application", detail=detail
    )
    assert text == "the pass raised ValueError, in lint"


def test_a_fingerprint_is_one_line_of_bounded_length() -> None:
    text = told("a\nb\x1b " * 1000, node="\ud800")
    assert "\n" not in text
    assert len(text) < MAX_LENGTH + 3


def test_the_case_has_the_fingerprint_of_its_finding() -> None:
    case = some_case()
    assert fingerprint_of(case) == fingerprint(case.program, case.rewritten, case.finding)


# ---------------------------------------------------------------------------------------------------------------- file


ENTRY = KnownFinding("mine:Pass", "wrong-value", "norm is unrelated", "output 0 is wrong", "0123abcd", "accepted")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    baseline = Baseline((ENTRY, replace(ENTRY, kind="race", reason='"é\n\ud800')))
    write_baseline(baseline, tmp_path / "known.json")
    assert read_baseline(tmp_path / "known.json") == baseline


def test_adding_keeps_entries_and_reasons() -> None:
    case = some_case()
    reasoned = replace(known_of(case), reason="accepted", title="old")
    baseline = Baseline((reasoned, ENTRY))
    assert baseline.with_cases([case]) == baseline
    assert Baseline((ENTRY,)).with_cases([case, case]).known == (ENTRY, known_of(case))


TEXT = """{
 "format": "tcverify-baseline", "version": 1,
 "known": [
  {"pass": "a:b", "kind": "race", "fingerprint": "{[\\"]}"},

  {"pass": "a:b",
   "kind": "race", "fingerprint": "y"}
 ]
}
"""


@pytest.mark.parametrize(
    ("old", "new", "line", "text"),
    [
        pytest.param('"y"}', '"y"', 8, "not JSON", id="syntax"),
        pytest.param('"y"}', '"y", "why": "so"}', 6, 'unknown key "why"', id="key"),
        pytest.param('"kind": "race", "fingerprint": "y"', '"kind": "race"', 6, 'lacks "fingerprint"', id="lacks"),
        pytest.param('"y"}', '"y", "reason": null}', 6, '"reason" is null, not a string', id="type"),
        pytest.param('"y"}', '"y"}, 3', 6, "an entry is an object, not 3", id="number"),
        pytest.param('"version": 1', '"version": 2', 2, "version 2; this tcverify reads 1", id="version"),
        pytest.param('"version": 1', '"version": 1, "more": 1', 2, 'unknown key "more"', id="top"),
        pytest.param('"known": [', '"known": {}, "x": [', 3, '"known" must be a list', id="known"),
        pytest.param("-baseline", "-program", 1, "not a baseline", id="format"),
    ],
)
def test_a_malformed_baseline_is_refused_with_its_line(
    tmp_path: Path, old: str, new: str, line: int, text: str
) -> None:
    path = tmp_path / "known.json"
    path.write_text(TEXT)
    assert [entry.fingerprint for entry in read_baseline(path).known] == ['{["]}', "y"]
    assert old in TEXT
    path.write_text(TEXT.replace(old, new))
    with pytest.raises(UsageError) as raised:
        read_baseline(path)
    assert raised.value.message.startswith(f"{path}, line {line}: ")
    assert text in raised.value.message


@pytest.mark.parametrize(
    ("data", "text"),
    [
        pytest.param(b"{\n\xff", "line 2: not UTF-8", id="bytes"),
        pytest.param(b"[" * 100_000, "nested too deeply", id="deep"),
        pytest.param(b"9" * 5000, "a number that is too long|line 1: not a baseline", id="digits"),
        pytest.param(b"{\n<<<<<<< ours\n", "line 2: not JSON", id="conflict"),
        pytest.param(b"[]", "line 1: not a baseline", id="list"),
    ],
)
def test_what_is_no_baseline_is_refused(tmp_path: Path, data: bytes, text: str) -> None:
    (tmp_path / "known.json").write_bytes(data)
    with pytest.raises(UsageError, match=text):
        read_baseline(tmp_path / "known.json")
    with pytest.raises(UsageError, match="there is no baseline"):
        read_baseline(tmp_path / "none.json")
    with pytest.raises(UsageError, match="cannot be read"):
        read_baseline(tmp_path)


# ----------------------------------------------------------------------------------------------------------- campaigns


class TwoDefects:
    """Takes neg for exp, and tanh for cos: two findings of one kind, the first in more programs."""

    def __call__(self, gm: fx.GraphModule) -> None:
        for node in gm.graph.nodes:
            for old, new in (("neg", "exp"), ("tanh", "cos")):
                if node.op == "call_function" and str(node.target) == f"aten.{old}.default":
                    node.target = getattr(fx.graph_module.torch.ops.aten, new).default
        gm.recompile()


PROGRAMS = st.sampled_from(
    [chain(*["aten::sigmoid"] * n, op) for n in range(4) for op in ("aten::neg", "aten::sigmoid")]
    + [chain("aten::sigmoid", "aten::tanh"), chain("aten::neg", "aten::tanh")]
)

Run = Callable[..., CampaignFinished]


def go(directory: Path, **plan: Any) -> CampaignFinished:
    where = {"report_dir": directory / "reports", "state_dir": directory / f"state{time.monotonic_ns()}"}
    options = {"programs": PROGRAMS, "max_examples": 30, "seed": 1, "shrink_time": 5.0, **where, **plan}
    return Campaign(InProcess(prepare_pass(TwoDefects, "", {})), CampaignPlan(mesh="2 ranks", **options), None).run()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return lambda **plan: go(tmp_path, **plan)


@pytest.fixture(scope="module")
def collecting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run that keeps every fingerprint has left what it found."""
    directory = tmp_path_factory.mktemp("collected")
    go(directory, collect=True, state_dir=directory / "state")
    return directory


@pytest.fixture(scope="module")
def collected(collecting: Path) -> dict[str, KnownFinding]:
    """What such a run finds, by fingerprint."""
    cases = map(read_counterexample, collecting.glob("reports/*/counterexample.json"))
    return {fingerprint_of(case): known_of(case) for case in cases}


NEG, TANH = "exp is unrelated", "cos is unrelated"


def test_a_run_keeps_one_case_per_kind_and_a_collecting_one_per_fingerprint(
    run: Run, collected: dict[str, KnownFinding]
) -> None:
    assert len(run().counterexamples) == 1
    assert set(collected) == {NEG, TANH}


def test_known_findings_do_not_fail_a_campaign(run: Run, collected: dict[str, KnownFinding]) -> None:
    baseline = Baseline(tuple(collected.values()))
    finished = run(baseline=baseline, seed=2)
    assert (finished.verdict, finished.counterexamples) == ("passed", ())
    counts = finished.statistics
    assert (counts.refuted, dict(counts.findings)) == (0, {})
    assert counts.known > 0 < counts.passed
    assert counts.programs == counts.passed + counts.known
    assert {entry.key for entry, _ in finished.known} <= {entry.key for entry in baseline.known}
    assert sum(n for _, n in finished.known) == counts.known


@pytest.mark.parametrize("known", [NEG, TANH])
def test_a_new_finding_of_a_known_kind_is_found(run: Run, collected: dict[str, KnownFinding], known: str) -> None:
    baseline = Baseline((collected[known],))
    finished = run(baseline=baseline, seed=2, fail_fast=True, max_examples=200)
    assert (finished.verdict, finished.stop) == ("refuted", "first finding")
    (case,) = finished.counterexamples
    assert {fingerprint_of(case), known} == {NEG, TANH}


def test_the_baseline_of_another_pass_does_not_matter(run: Run, collected: dict[str, KnownFinding]) -> None:
    entries = [replace(entry, target="another:Pass") for entry in collected.values()]
    finished = run(baseline=Baseline(tuple(entries)))
    assert (finished.verdict, finished.statistics.known, finished.known) == ("refuted", 0, ())


def test_nothing_but_known_findings_is_nothing_tested(run: Run, collected: dict[str, KnownFinding]) -> None:
    baseline = Baseline(tuple(collected.values()))
    finished = run(baseline=baseline, programs=st.just(chain("aten::neg")))
    assert (finished.verdict, finished.why) == ("nothing tested", "no program passed (1 with known findings)")


def test_a_planted_defect_is_known_with_other_seeds(tmp_path: Path) -> None:
    def verified(seed: int, **plan: Any) -> CampaignFinished:
        where = {"report_dir": tmp_path / f"r{seed}", "state_dir": tmp_path / f"s{seed}"}
        options = {"max_examples": 12, "shrink_time": 3.0, "seed": seed, **where, **plan}
        subject = InProcess(prepare_pass(FirstChunkForAll, "", {}))
        return Campaign(subject, CampaignPlan(transformer_programs(world_size=2), "2 ranks", **options), None).run()

    known = Baseline().with_cases(verified(1, collect=True, fail_fast=True).counterexamples)
    finished = verified(2, baseline=known)
    assert known.known
    assert (finished.verdict, finished.counterexamples) == ("passed", ())
    assert finished.statistics.known > 1


def test_an_earlier_failure_that_is_known_does_not_fail_a_campaign(
    run: Run, collecting: Path, collected: dict[str, KnownFinding]
) -> None:
    assert list(collecting.glob("state/failures/*/*/counterexample.json"))
    baseline, sound = Baseline(tuple(collected.values())), st.just(chain("aten::sigmoid"))
    finished = run(baseline=baseline, programs=sound, state_dir=collecting / "state")
    assert (finished.verdict, finished.counterexamples) == ("passed", ())
    assert (finished.statistics.known, finished.statistics.passed) == (2, 1)


# ------------------------------------------------------------------------------------------------------------- summary


def _finished(name: str, stop: str, *known: tuple[KnownFinding, int]) -> CampaignFinished:
    facts = PassFacts(name, f"mine:{name}")
    return CampaignFinished(facts, "2 ranks", Statistics(), (), "passed", "", stop, 1, known)


def test_a_summary_names_what_is_no_longer_seen() -> None:
    other = replace(ENTRY, fingerprint="add is scaled")
    baseline = Baseline((ENTRY, other, replace(ENTRY, target="mine:Other")))
    lines = list(baseline_lines(baseline, Path("known.json"), [_finished("Pass", "examples", (ENTRY, 3))]))
    assert lines == [
        "baseline known.json: 1 of 2 known findings found again; 1 for passes that did not run",
        "  not found again, wrong-value of mine:Pass: add is scaled; remove it from the baseline?",
    ]


@pytest.mark.parametrize("stop", ["interrupted", "first finding"])
def test_what_ended_early_misses_nothing(stop: str) -> None:
    lines = list(baseline_lines(Baseline((ENTRY,)), Path("known.json"), [_finished("Pass", stop)]))
    assert lines == ["baseline known.json: 0 of 1 known finding found again"]
