"""What items do: one run of pytest over tests of all kinds, a second one over the same, and what each test left behind."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from tcverify.cli import main
from tests.pytest_plugin.conftest import Once, Ran, run, write

PASSES = """
def reductions(gm):
    return [n for n in gm.graph.nodes if n.op == "call_function" and str(n.target) == "tensor_cast.all_reduce.default"]

def drops(gm):
    for node in reductions(gm):
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)

class Drops:
    def __call__(self, gm):
        drops(gm)

class Raises:
    def __call__(self, gm):
        if reductions(gm):
            raise ValueError("no idea")

class DoesNothing:
    def __call__(self, gm):
        pass

class Forgets:
    def __call__(self, gm):
        for node in reductions(gm):
            del node.meta["val"]
            node.args = node.args
        gm.recompile()

class ReadsMetadata:
    def __call__(self, gm):
        for node in gm.graph.nodes:
            if node.op == "call_function":
                node.meta["val"]
"""

TESTS = """
import os
import warnings

import pytest
from hypothesis import strategies as st

import tcverify
from passes import DoesNothing, Drops, Forgets, Raises, ReadsMetadata, drops
from tcverify.passes import Identity, SequenceParallel
from tcverify.pytest_plugin.failures import WrongValue
from tcverify.strategies import decode, transformer_programs
from tcverify import Mesh

# Mostly instances, which are applied in the process of the test: a process for the pass takes seconds to start.
few = dict(max_examples=12, confirm="none", shrink_time=0.2)


@tcverify.verifies(SequenceParallel(), programs=transformer_programs, world_sizes=(2, 4), shards=2, **few)
def test_sound(verdict, tmp_path):
    assert tmp_path.is_dir()
    assert verdict.passed and verdict.status == "passed"
    assert verdict.programs == verdict.statistics.programs == 12
    assert verdict.share("P1") == verdict.statistics.fired["P1"] / 12 > 0
    assert verdict.counterexamples == ()
    print("seed", verdict.world, verdict.shard, verdict.seed)


def of_this_file(gm):
    drops(gm)


@tcverify.verifies(of_this_file, world_sizes=(2,), **few)
def test_planted(verdict):
    print("the body was called")


@tcverify.verifies(DoesNothing(), world_sizes=(2,), **few)
def test_nothing_fires(verdict):
    print("the body was called")


@tcverify.verifies(DoesNothing(), world_sizes=(2,), contract={"identity": True}, **few)
def test_promised_to_do_nothing(verdict):
    assert verdict.statistics.changed == 0


@tcverify.verifies(Forgets(), world_sizes=(2,), contract={"identity": True}, **few)
def test_hygiene(verdict):
    assert verdict.statistics.hygiene["stale-metadata"] and not verdict.counterexamples


@tcverify.verifies(ReadsMetadata(), world_sizes=(2,), hostile=("metadata",), contract={"identity": True}, **few)
def test_hostile(verdict):
    pass


@tcverify.verifies(SequenceParallel(), world_sizes=(2,), **few)
def test_body_asks_for_more(verdict):
    assert verdict.share("P1") > 2


@pytest.mark.xfail(raises=WrongValue, strict=True)
@tcverify.verifies(Drops(), world_sizes=(2,), **few)
def test_expected(verdict):
    pass


@pytest.mark.xfail(raises=WrongValue, strict=True)
@tcverify.verifies(Raises(), world_sizes=(2,), **few)
def test_another_kind(verdict):
    pass


@pytest.mark.skip(reason="not today")
@tcverify.verifies(Drops(), world_sizes=(2,), **few)
def test_skipped(verdict):
    pass


@tcverify.verifies(Identity(), SequenceParallel(), Drops(), world_sizes=(2,), **few)
def test_several():
    pass


@pytest.mark.parametrize("size", [8, 9])
@tcverify.verifies(Identity(), meshes=[{"tp": 2}, {"dp": 2, "tp": 2}], **few)
def test_parametrized(size, verdict):
    assert size in (8, 9)


class TestOfAClass:
    @tcverify.verifies(SequenceParallel(), programs="structured", world_sizes=[2], **few)
    def test_method(self, request, verdict):
        assert request.node.get_closest_marker("tcverify")


@tcverify.verifies(Identity(), programs=transformer_programs(), world_sizes=[3], **few)
def test_strategy_of_other_sizes(verdict):
    assert verdict.statistics.programs == 12


@tcverify.verifies(Identity(), programs=st.just(decode(Mesh.grid({"tp": 2}), b"")), world_sizes=[3], **few)
def test_strategy_without_the_size(verdict):
    pass


@tcverify.verifies(Identity(), programs=transformer_programs(), **few)
def test_strategy_alone(verdict):
    assert verdict.statistics.programs == 12


@tcverify.verifies(Identity(), programs=lambda mesh, world_size: transformer_programs(world_size=2), world_sizes=[3], **few)
def test_deaf_factory(verdict):
    pass


@tcverify.verifies("no_such_module:thing", world_sizes=[2], **few)
def test_no_such_pass(verdict):
    pass


class Warns:
    def __call__(self, gm):
        warnings.warn("an error wherever the tests say so", UserWarning)
        assert os.getcwd() == START


START = os.getcwd()


@pytest.mark.filterwarnings("error")
@tcverify.verifies(Warns(), contract={"identity": True}, world_sizes=[2], **few)
def test_what_tests_set_does_not_reach_the_campaign(verdict, monkeypatch, tmp_path):
    pass


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
"""


@dataclass(frozen=True)
class Twice:
    """The same tests, run twice."""

    directory: Path
    first: Ran
    second: Ran


@pytest.fixture(scope="module")
def twice(once: Once) -> Twice:
    def make(directory: Path) -> list[Ran]:
        write(directory, {"tests/test_all.py": TESTS, "tests/passes.py": PASSES})
        first = run(directory, "-rA", "--junitxml=first.xml")
        return [first, run(directory, "-rA", "-k", "planted or sound")]

    directory, (first, second) = once("items", make)
    return Twice(directory, first, second)


def line_of(ran: Ran, test: str) -> str:
    """The line of the short summary about a test."""
    (line,) = [line for line in ran.section("short test summary info").splitlines() if f"::{test}" in line]
    return line


def failure(ran: Ran, test: str) -> str:
    """The text that is shown of a failed test."""
    match = re.search(
        rf"^_+ {re.escape(test)}[^\n]* _+\n(.*?)(?=^_{{3,}} |^={{3,}} )", ran.out, re.DOTALL | re.MULTILINE
    )
    assert match, ran.out
    return match.group(1)


def test_one_item_per_pass_world_and_shard(twice: Twice) -> None:
    for world in ("2ranks", "4ranks"):
        for shard in ("0/2", "1/2"):
            assert "PASSED" in line_of(twice.first, f"test_sound[sequence_parallel-{world}-{shard}]")


def test_it_fails_with_1(twice: Twice) -> None:
    assert twice.first.code == 1, twice.first.out
    assert twice.second.code == 1


def test_a_planted_defect_fails_with_its_block(twice: Twice) -> None:
    shown = failure(twice.first, "test_planted[of_this_file-2ranks]")
    assert "wrong-value: an output differs from the original's" in shown
    assert re.search(r"rank [01], before ⇒ after the pass \(- removed, \+ added\)", shown)
    assert "tcverify replay" in shown
    assert "Traceback" not in shown
    assert "pytest_plugin" not in shown


def test_the_cause_stands_in_the_short_summary(twice: Twice) -> None:
    assert "- wrong-value: " in line_of(twice.first, "test_planted[")


def test_the_body_of_a_refuted_pass_is_not_called(twice: Twice) -> None:
    assert "the body was called" not in twice.first.out


def test_a_counterexample_can_be_replayed(twice: Twice, monkeypatch: pytest.MonkeyPatch) -> None:
    match = re.search(r"case ([0-9a-f]{8})", failure(twice.first, "test_planted["))
    assert match
    folder = twice.directory / "reports" / match.group(1)
    assert {path.name for path in folder.iterdir()} == {"counterexample.json", "repro.py", "report.html"}
    target = json.loads((folder / "counterexample.json").read_text())["pass"]["target"]
    assert target == "tests/test_all.py:of_this_file"
    monkeypatch.chdir(twice.directory)
    result = CliRunner().invoke(main.main, ["replay", match.group(1), "--confirm", "none"])
    assert result.exit_code == 1
    assert "x FAILED" in result.output


def test_a_pass_that_does_nothing_fails(twice: Twice) -> None:
    assert "nothing tested: the pass changed none of 12 programs" in failure(twice.first, "test_nothing_fires[")


def test_unless_it_promises_that(twice: Twice) -> None:
    assert "PASSED" in line_of(twice.first, "test_promised_to_do_nothing[")


def test_the_body_may_ask_for_more(twice: Twice) -> None:
    shown = failure(twice.first, "test_body_asks_for_more[")
    assert "assert verdict.share" in shown
    assert '"P1") > 2' in shown
    assert "passed, but the test failed: tests/test_all.py::test_body_asks_for_more[" in twice.first.section("tcverify")


def test_kinds_of_findings_are_classes(twice: Twice) -> None:
    assert "XFAIL" in line_of(twice.first, "test_expected[")
    assert "FAILED" in line_of(twice.first, "test_another_kind[")
    assert "pass-raised" in line_of(twice.first, "test_another_kind[")


def test_marks_work(twice: Twice) -> None:
    assert re.search(r"SKIPPED \[1\] .*not today", twice.first.out)


def test_several_passes_and_a_body_without_the_argument(twice: Twice) -> None:
    assert "PASSED" in line_of(twice.first, "test_several[sequence_parallel-2ranks]")
    assert "PASSED" in line_of(twice.first, "test_several[identity-2ranks]")
    assert "FAILED" in line_of(twice.first, "test_several[Drops-2ranks]")


def test_what_runs_in_the_process_of_the_test_is_said(twice: Twice) -> None:
    section = twice.first.section("tcverify")
    assert "the pass runs in the test's process" in section.partition("test_several[sequence_parallel-2ranks]")[2]


def test_hygiene_is_listed_and_fails_nothing(twice: Twice) -> None:
    assert "PASSED" in line_of(twice.first, "test_hygiene[Forgets-2ranks]")
    section = twice.first.section("tcverify")
    assert re.search(
        r"hygiene, stale-metadata: \d+ programs?\n    meta\['val'\] of '\w+' is missing, case \w{8}\n", section
    )


def test_hostile_metadata_is_drawn_where_it_is_asked_for(twice: Twice) -> None:
    assert "FAILED" in line_of(twice.first, "test_hostile[ReadsMetadata-2ranks]")
    assert "KeyError: 'val'" in twice.first.section("tcverify") + twice.first.out


def test_parameters_of_ones_own_come_on_top(twice: Twice) -> None:
    for name in ("identity-tp2-8", "identity-tp2-9", "identity-dp2tp2-8", "identity-dp2tp2-9"):
        assert "PASSED" in line_of(twice.first, f"test_parametrized[{name}]")


def test_methods_and_the_mark(twice: Twice) -> None:
    assert "PASSED" in line_of(twice.first, "TestOfAClass::test_method[sequence_parallel-2ranks]")


def test_a_strategy_is_used_as_it_is(twice: Twice) -> None:
    assert "PASSED" in line_of(twice.first, "test_strategy_of_other_sizes[identity-3ranks]")
    assert "PASSED" in line_of(twice.first, "test_strategy_alone[identity]")
    assert "the strategy drew no program of 3 ranks" in failure(twice.first, "test_strategy_without_the_size[")


def test_a_factory_is_to_heed_the_size(twice: Twice) -> None:
    shown = failure(twice.first, "test_deaf_factory[")
    assert "the strategy drew a program of 2 ranks, where one of 3 was asked for" in shown
    assert "Traceback" not in shown


def test_a_pass_that_cannot_be_loaded_is_an_error_without_traceback(twice: Twice) -> None:
    shown = failure(twice.first, "test_no_such_pass[")
    assert shown.startswith("Error: there is no module 'no_such_module'\n  hint: ")


def test_what_tests_set_does_not_reach_the_campaign(twice: Twice) -> None:
    assert "PASSED" in line_of(twice.first, "test_what_tests_set_does_not_reach_the_campaign[")


def test_the_summary_tells_what_was_verified(twice: Twice) -> None:
    section = twice.first.section("tcverify")
    assert re.search(
        r"passed: tests/test_all.py::test_sound\[sequence_parallel-2ranks-0/2\]\n"
        r"  12 programs, changed \d+ %, P1 \d+ %.*; seed \d+\n",
        section,
    )
    assert "refuted: tests/test_all.py::test_planted[of_this_file-2ranks]\n" in section
    assert re.search(r"(?m)^[0-9a-f]{8} of_this_file: wrong-value   tcverify replay [0-9a-f]{8}$", section)


def seeds(ran: Ran) -> dict[str, str]:
    found = re.findall(r"(?m)^[a-z, ]+: (\S+\[\S+\])\n  .*; seed (\d+)$", ran.section("tcverify"))
    assert found
    return dict(found)


def test_seeds_are_stable(twice: Twice) -> None:
    first, second = seeds(twice.first), seeds(twice.second)
    assert len(second) == 5
    assert second.items() <= first.items()


def test_seeds_differ_between_items(twice: Twice) -> None:
    found = seeds(twice.first).values()
    assert len(set(found)) == len(found)


def test_earlier_failures_come_first(twice: Twice) -> None:
    assert "failed earlier and was tried first" not in twice.first.out
    cases = re.findall(r"case ([0-9a-f]{8})", failure(twice.first, "test_planted["))
    told = re.search(r"failed earlier and was tried first: (.*) \(", failure(twice.second, "test_planted["))
    assert told
    assert cases[0] in told[1].split(", ")


def test_what_passes_leaves_no_state(twice: Twice) -> None:
    kept = [path.name for path in (twice.directory / ".tcverify" / "items").iterdir()]
    assert any("test-planted" in name for name in kept)
    assert not any("test-sound" in name for name in kept)


def test_junit_has_the_counts_and_the_block(twice: Twice) -> None:
    cases = ElementTree.parse(twice.directory / "first.xml").getroot().iter("testcase")
    (case,) = [case for case in cases if (case.get("name") or "").startswith("test_planted[")]
    properties = {p.get("name"): p.get("value") for p in case.iter("property")}
    assert properties["tcverify_verdict"] == "refuted"
    assert properties["tcverify_programs"] == "12"
    (failed,) = case.iter("failure")
    assert (failed.get("message") or "").startswith("wrong-value: output")
    assert "before ⇒ after the pass" in (failed.text or "")
