"""`checked`: a pass verified on the graphs that a compiler gives it, on hand-made graphs without a process group."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tcverify import PARTIAL, Contract, Mesh, ProcessGroupPool, Refuted, Unsupported, annotate, checked, shard, verify
from tcverify.capturing import GroupFacts
from tcverify.cases.counterexample import read_counterexample
from tcverify.compile_check import CheckedPass, Tally
from tcverify.compile_check.pairing import mesh_for
from tcverify.errors import PassLoadError, ProgramError, UsageError
from tcverify.passes.identity import Identity
from tcverify.program.graph import same_structure
from tcverify.verification.exceptions import MalformedGraph, WrongValue
from tests.support import checked_passes as passes

C10D = torch.ops._c10d_functional
TP = Mesh.grid({"tp": 2})

#: All tests are about a job of two ranks in which group "7" is tp.
JOB: dict[str, Any] = {"mesh": TP, "groups": {"7": "tp"}, "minimise": 15.0}


def summed(x: torch.Tensor) -> torch.Tensor:
    return C10D.wait_tensor(C10D.all_reduce(torch.relu(x), "sum", "7")) + 1


def traced(function: Callable[..., Any] = summed, *inputs: torch.Tensor) -> fx.GraphModule:
    given = inputs or (torch.ones(4, 6),)
    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class TestVerdicts:
    def test_a_sound_pass_passes_and_returns_what_it_returns(self) -> None:
        pass_ = checked(passes.scatter_and_gather, **JOB)
        gm = traced()

        assert pass_(gm) is gm
        assert len(passes.waits(gm.graph)) == 2
        assert (pass_.report().status, pass_.report().changed, pass_.report().passed) == ("passed", 1, 1)

    def test_a_defect_is_raised_with_its_counterexample(self, tmp_path: Path) -> None:
        pass_ = checked(passes.forget_sum, **JOB)

        with pytest.raises(WrongValue, match="all_reduce") as caught:
            pass_(traced())

        assert isinstance(caught.value, Refuted)
        (path,) = pass_.report().cases
        case = read_counterexample(tmp_path / path)
        assert case.facts.target == "tests.support.checked_passes:forget_sum"
        assert case.program.size == 2  # shrunk to the all_reduce and its wait
        assert (tmp_path / path).with_name("report.html").exists()
        assert (tmp_path / path).with_name("repro.py").exists()
        assert verify(passes.forget_sum, case.program).status == "refuted"

    def test_a_pass_that_cannot_be_imported_is_made_small_in_this_process(self) -> None:
        def closure(gm: fx.GraphModule) -> None:
            passes.forget_sum(gm)

        pass_ = checked(closure, **JOB)
        with pytest.raises(WrongValue, match="cannot be imported by name"):
            pass_(traced())
        assert read_counterexample(Path(pass_.report().cases[0])).program.size == 2

    def test_without_time_and_directory_the_counterexample_is_only_shown(self, tmp_path: Path) -> None:
        pass_ = checked(passes.forget_sum, **{**JOB, "minimise": 0}, report_dir=None)

        with pytest.raises(WrongValue, match=r"aten.relu|relu\("):
            pass_(traced())
        assert not list(tmp_path.iterdir())

    def test_a_pass_that_never_changes_anything_says_so(self) -> None:
        pass_ = checked(passes.nothing, **JOB)
        pass_(traced())

        assert pass_.report().status == "nothing tested"
        assert "never changed anything" in str(pass_.report())

    @pytest.mark.parametrize(
        ("pass_", "kind"),
        [
            (passes.use_before_definition, "malformed-graph"),
            (passes.another_output, "changed-signature"),
            (passes.new_but_changes_given, "impure-pass"),
        ],
    )
    def test_graphs_that_are_none_are_refuted(self, pass_: Any, kind: str) -> None:
        with pytest.raises(Refuted) as caught:
            checked(pass_, contract=Contract(strict=True), **JOB)(traced())
        assert caught.value.kind == kind
        assert (kind == "malformed-graph") is isinstance(caught.value, MalformedGraph)

    def test_only_the_chosen_checks_judge(self) -> None:
        pass_ = checked(passes.forget_sum, checks=["structure"], **JOB)
        pass_(traced())
        assert pass_.report().refuted == 0

    def test_the_same_graphs_are_verified_once(self) -> None:
        pass_ = checked(passes.scatter_and_gather, **JOB)
        for _ in range(3):
            pass_(traced())
        pass_(traced(summed, torch.ones(2, 6)))
        assert (pass_.report().calls, pass_.report().cached, pass_.report().passed) == (4, 2, 4)

        pass_ = checked(passes.scatter_and_gather, cache=False, **JOB)
        for _ in range(2):
            pass_(traced())
        assert pass_.report().cached == 0

    def test_a_refuted_pair_stays_refuted(self) -> None:
        pass_ = checked(passes.forget_sum, **JOB)
        for _ in range(2):
            with pytest.raises(WrongValue):
                pass_(traced())
        assert (pass_.report().refuted, pass_.report().cached, len(pass_.report().cases)) == (2, 1, 1)

    def test_other_domains_and_executors_judge_too(self, pool: Callable[[int], ProcessGroupPool]) -> None:
        pass_ = checked(passes.scatter_and_gather, domain="exact", confirm=pool(2), **JOB)
        pass_(traced())
        assert pass_.report().status == "passed"

        def nearly(gm: fx.GraphModule) -> None:
            """Off by one part in 10¹³: floating point takes it for rounding."""
            wait = passes.waits(gm.graph)[0]
            with gm.graph.inserting_after(wait):
                scaled = passes.call(gm.graph, torch.ops.aten.mul.Tensor, wait, 1 + 1e-13)
            wait.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)

        with pytest.raises(Refuted):
            checked(nearly, domain="exact", **JOB)(traced())


class TestModes:
    def test_log_goes_on_with_the_rewritten_graph(self, caplog: pytest.LogCaptureFixture) -> None:
        pass_ = checked(passes.forget_sum, mode="log", **JOB)
        gm = traced()

        assert pass_(gm) is None
        assert not passes.waits(gm.graph)
        assert [r.levelno for r in caplog.records if "wrong-value" in r.message] == [logging.ERROR]

    @pytest.mark.parametrize("bare", [False, True])
    def test_fallback_goes_on_with_the_original(self, bare: bool) -> None:
        pass_ = checked(passes.GraphwiseWrong() if bare else passes.forget_sum, mode="log", fallback=True, **JOB)
        gm, original = traced(), traced()

        assert pass_(gm.graph if bare else gm) is None
        gm.recompile()
        assert same_structure(gm.graph, original.graph)
        gm.graph.lint()
        assert [n.meta.get("val") is not None for n in gm.graph.nodes][:-1] == [True] * (len(gm.graph.nodes) - 1)

    def test_fallback_gives_attributes_back(self) -> None:
        weight = nn.Parameter(torch.ones(4, 6))

        def loses(gm: fx.GraphModule) -> fx.GraphModule:
            passes.forget_sum(gm)
            node = next(n for n in gm.graph.nodes if n.op == "get_attr")
            product = next(iter(node.users))
            product.replace_all_uses_with(product.args[0])
            gm.graph.erase_node(product)
            gm.graph.erase_node(node)
            delattr(gm, node.target)
            return gm

        gm = traced(lambda x: summed(x * weight))
        back = checked(loses, mode="log", fallback=True, **JOB)(gm)
        assert back is gm
        assert any(value is weight for value in gm.parameters())

    def test_unknown_modes_are_refused(self) -> None:
        with pytest.raises(UsageError, match="no mode 'warn'"):
            checked(passes.nothing, mode="warn")
        with pytest.raises(UsageError, match="mode='log'"):
            checked(passes.nothing, fallback=True)
        with pytest.raises(UsageError, match="no check 'beauty'"):
            checked(passes.nothing, checks=["beauty"])
        with pytest.raises(UsageError, match="checked already"):
            checked(checked(passes.nothing))
        with pytest.raises(PassLoadError):
            checked("no.such.module:Pass")
        with pytest.raises(UsageError, match="called with int"):
            checked(passes.nothing)(3)


class TestTheCompileGoesOn:
    def test_what_the_pass_raises_comes_through_as_it_is(self) -> None:
        pass_ = checked(passes.raises, **JOB)
        with pytest.raises(LookupError, match="no such pattern"):
            pass_(traced())
        assert pass_.report().status == "refuted"

        pass_ = checked(passes.declines, **JOB)
        with pytest.raises(Unsupported):
            pass_(traced())
        assert pass_.report().doubts == {"declined": 1}

    def test_unknown_ops_are_doubts_told_once(self, caplog: pytest.LogCaptureFixture) -> None:
        library = torch.library.Library("checked_test", "DEF")
        try:
            library.define("odd(Tensor x, int peer) -> Tensor")
            library.impl("odd", lambda x, peer: torch.clone(x), "Meta")
            pass_ = checked(passes.scatter_and_gather, cache=False, **JOB)
            for _ in range(2):
                gm = traced(lambda x: torch.ops.checked_test.odd(summed(x), 1))
                assert pass_(gm) is gm
        finally:
            library._destroy()
        report = pass_.report()
        assert (report.status, report.inconclusive, report.passed) == ("inconclusive", 2, 0)
        assert "checked_test::odd" in report.details["unsupported-op"]
        assert sum("checked_test::odd" in record.message for record in caplog.records) == 1

    def test_higher_order_ops_are_no_obstacle(self) -> None:
        def branches(x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (summed(x),))

        pass_ = checked(passes.scatter_and_gather, **JOB)
        pass_(traced(branches))
        assert (pass_.report().status, pass_.report().changed) == ("passed", 1)

    def test_ops_that_may_communicate_through_a_wrapper_are_doubts(self) -> None:
        """What Inductor has in place of a custom op that writes into its operand."""
        from torch._higher_order_ops.auto_functionalize import auto_functionalized

        library = torch.library.Library("checked_test", "DEF")
        try:
            library.define("increment_(Tensor(a!) x, int peer) -> ()")
            library.impl("increment_", lambda x, peer: None, "Meta")
            op = torch.ops.checked_test.increment_.default
            pass_ = checked(passes.scatter_and_gather, **JOB)
            gm = traced(lambda x: auto_functionalized(op, x=summed(x), peer=1)[1])
            assert pass_(gm) is gm
        finally:
            library._destroy()
        assert "checked_test::increment_" in pass_.report().details["unsupported-op"]

    def test_what_is_too_large_to_run_is_verified_on_small_sizes(self) -> None:
        with FakeTensorMode():
            large = torch.empty(1 << 20, 1 << 20)
        pass_ = checked(passes.scatter_and_gather, **JOB)
        gm = traced(summed, large)
        assert pass_(gm) is gm
        assert (pass_.report().inconclusive, pass_.report().refuted, pass_.report().changed) == (0, 0, 1)

    def test_inputs_without_a_shape_are_doubts(self) -> None:
        gm = traced()
        gm.graph.find_nodes(op="placeholder")[0].meta["val"] = None
        gm.graph.find_nodes(op="placeholder")[0].meta.pop("val")
        pass_ = checked(passes.nothing, **JOB)
        assert pass_(gm) is gm
        assert "no meta['val']" in pass_.report().details["not-captured"]

    def test_one_rank_has_nothing_to_verify(self, caplog: pytest.LogCaptureFixture) -> None:
        pass_ = checked(passes.forget_sum)
        for _ in range(2):
            pass_(traced())
        assert (pass_.report().unverified, pass_.report().status) == (2, "nothing tested")
        assert sum("nothing to verify" in record.message for record in caplog.records) == 1

    def test_an_unknown_group_is_a_doubt(self) -> None:
        mesh = Mesh.grid({"dp": 2, "tp": 2})
        pass_ = checked(passes.scatter_and_gather, mesh=mesh)
        pass_(traced())
        assert "'7'" in pass_.report().details["not-captured"]

    def test_settings_of_the_process_stay(self) -> None:
        torch.manual_seed(3)
        expected = torch.rand(1)
        torch.manual_seed(3)
        torch.set_default_dtype(torch.float64)
        try:
            threads = torch.get_num_threads()
            checked(passes.scatter_and_gather, **JOB)(traced(summed, torch.ones(4, 6, dtype=torch.float32)))
            assert torch.get_default_dtype() == torch.float64
            assert torch.is_grad_enabled()
            assert torch.get_num_threads() == threads
            assert torch.rand(1, dtype=torch.float32) == expected
        finally:
            torch.set_default_dtype(torch.float32)


class TestConventions:
    def test_a_graph_alone(self) -> None:
        pass_ = checked(passes.Graphwise(), **JOB)
        gm = traced()
        assert pass_(gm.graph) is None
        assert len(passes.waits(gm.graph)) == 2
        assert pass_.report().passed == 1

    def test_a_graph_without_a_module(self) -> None:
        graph = passes._copy(traced().graph)
        pass_ = checked(passes.Graphwise(), **JOB)
        pass_(graph)
        assert pass_.report().passed == 1

    def test_a_graph_pass_can_be_replayed_where_it_says_that_it_is_one(self) -> None:
        pass_ = checked(passes.GraphwiseWrong(), **JOB)
        with pytest.raises(WrongValue):
            pass_(traced().graph)
        case = read_counterexample(Path(pass_.report().cases[0]))
        assert case.facts.target == "tests.support.checked_passes:GraphwiseWrong"
        assert verify(case.facts.target, case.program).status == "refuted"

        pass_ = checked(passes.unannotated, **JOB)
        with pytest.raises(WrongValue, match="cannot be imported by name"):
            pass_(traced().graph)
        assert not read_counterexample(Path(pass_.report().cases[0])).replayable

    def test_missing_metadata_counts_where_a_module_is_given(self) -> None:
        def bare(graph: fx.Graph) -> None:
            wait = passes.waits(graph)[0]
            with graph.inserting_after(wait):
                once = graph.call_function(torch.ops.aten.mul.Tensor, (wait, 1.0))
            wait.replace_all_uses_with(once, delete_user_cb=lambda user: user is not once)

        pass_ = checked(bare, **JOB)
        pass_(traced().graph)  # Inductor makes metadata anew
        assert pass_.report().passed == 1
        with pytest.raises(Refuted) as caught:
            checked(lambda gm: bare(gm.graph), contract=Contract(metadata=True), **JOB)(traced())
        assert caught.value.kind == "stale-metadata"

    def test_a_pipeline_runs_as_a_whole(self) -> None:
        here = "tests.support.checked_passes"
        pass_ = checked(f"{here}:scatter_and_gather+{here}:nothing", **JOB)
        gm = pass_(traced())
        assert len(passes.waits(gm.graph)) == 2
        assert pass_.report().status == "passed"
        with pytest.raises(WrongValue):
            checked(f"{here}:forget_sum+{here}:nothing", **JOB)(traced())

    def test_example_inputs(self) -> None:
        pass_ = checked(passes.with_examples, **JOB)
        pass_(traced(), [torch.ones(4, 6)])
        assert pass_.report().passed == 1

    def test_a_pass_manager_holds_checked_passes(self) -> None:
        class Manager(CustomGraphPass):
            def __init__(self) -> None:
                self.passes: list[Any] = []

            def __call__(self, graph: fx.Graph) -> None:
                for one in self.passes:
                    if one.is_applicable(None):
                        one(graph)

            def uuid(self) -> Any:
                return [one.uuid() for one in self.passes]

        manager = Manager()
        manager.passes = [checked(passes.Graphwise(), **JOB), checked(passes.Graphwise(), **JOB)]
        manager(traced().graph)
        assert [one.report().changed for one in manager.passes] == [1, 0]  # the second finds no all_reduce any more

        whole = checked(manager, **JOB)
        whole(traced().graph)
        assert whole.report().passed == 1
        assert whole.passes is manager.passes

    def test_what_inductor_caches_by(self) -> None:
        pass_ = checked(passes.Graphwise(), **JOB)
        assert isinstance(pass_, CustomGraphPass)
        assert pass_.applicable_to == "everything"
        first = pass_.uuid()
        assert isinstance(first, str)
        assert first == checked(passes.Graphwise(), **JOB).uuid()
        assert first != checked(passes.Graphwise(), checks=["structure"], **JOB).uuid()
        assert checked(passes.Graphwise(), mode="log", **JOB).uuid() is None  # a refuted graph must not be kept
        assert checked(passes.scatter_and_gather).uuid() != checked(passes.forget_sum).uuid() is not None
        assert checked(lambda gm: gm).uuid() is None
        with pytest.raises(AttributeError):
            pass_.no_such_attribute  # noqa: B018

    def test_copies_are_passes_too(self) -> None:
        pass_ = checked(passes.Graphwise(), **JOB)
        other = copy.deepcopy(pass_)
        assert isinstance(other, CheckedPass)
        assert other._channel != pass_._channel  # ranks must not take calls of one for calls of the other
        other(traced().graph)
        assert (other.report().calls, pass_.report().calls) == (1, 0)
        with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
            pickle.loads(pickle.dumps(checked(lambda gm: gm)))  # noqa: S301


class TestAttributes:
    def test_folded_constants_are_judged_by_their_values(self) -> None:
        scale = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])

        def fold(by: float) -> Callable[[fx.GraphModule], None]:
            def pass_(gm: fx.GraphModule) -> None:
                node = next(n for n in gm.graph.nodes if n.op == "get_attr")
                double = next(iter(node.users))
                gm.register_buffer("folded", by * getattr(gm, str(node.target)))
                with gm.graph.inserting_before(double):
                    made = gm.graph.get_attr("folded")
                made.meta["val"] = double.meta["val"]
                double.replace_all_uses_with(made)
                gm.graph.erase_node(double)
                gm.graph.erase_node(node)

            return pass_

        right = checked(fold(2.0), **JOB)
        right(traced(lambda x: summed(x) * (scale * 2)))
        assert (right.report().status, right.report().changed) == ("passed", 1)
        with pytest.raises(WrongValue):
            checked(fold(3.0), **JOB)(traced(lambda x: summed(x) * (scale * 2)))

    def test_attributes_changed_in_place_are_doubts(self) -> None:
        weight = nn.Parameter(torch.ones(6))

        def scales(gm: fx.GraphModule) -> None:
            with torch.no_grad():
                weight.mul_(2)

        pass_ = checked(scales, **JOB)
        pass_(traced(lambda x: summed(x) * weight))
        assert "changes the values of the attribute" in pass_.report().details["not-captured"]


class TestGraphsOfOneRank:
    """Graphs without collectives: each rank judges its own."""

    @staticmethod
    def swapped(gm: fx.GraphModule) -> None:
        for node in gm.graph.nodes:
            if node.target in (torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor):
                node.args = node.args[::-1]

    def test_a_right_rewrite_passes(self) -> None:
        pass_ = checked(self.swapped, **JOB)
        pass_(traced(lambda x, y: x + y, torch.ones(3), torch.ones(3)))
        assert (pass_.report().status, pass_.report().changed) == ("passed", 1)

    def test_a_wrong_rewrite_is_refuted(self) -> None:
        with pytest.raises(WrongValue):
            checked(self.swapped, **JOB)(traced(lambda x, y: x - y, torch.ones(3), torch.ones(3)))


class TestOneRankForAll:
    def test_a_pass_that_reads_the_rank_from_the_graph(self) -> None:
        pass_ = checked(passes.rows_by_meta, **JOB)
        pass_(traced())
        assert (pass_.report().status, pass_.report().changed) == ("passed", 1)

    def test_a_pass_that_knows_only_its_own_rank_is_a_doubt(self) -> None:
        pass_ = checked(passes.RowsByConstruction(), **JOB)
        pass_(traced())
        assert pass_.report().status == "inconclusive"
        assert "may depend on the rank" in pass_.report().details["one-rank"]

    def test_a_defect_that_has_nothing_to_do_with_ranks_is_refuted_all_the_same(self) -> None:
        with pytest.raises(WrongValue):
            checked(passes.forget_sum, **JOB)(traced())

    def test_placements_are_used_and_told(self) -> None:
        seen = {}

        def look(gm: fx.GraphModule) -> None:
            node = gm.graph.find_nodes(op="placeholder")[0]
            seen.update(gm.meta, placement=node.meta.get("placement"))

        gm = traced()
        checked(look, placements={"*": {"tp": PARTIAL}}, **JOB)(gm)
        assert seen["rank"] == 0
        assert seen["groups"] == {"7": (0, 1)}
        assert seen["alike"] == ("7",)
        assert {"relu", "wait_tensor"} <= seen["same_numbers"]
        assert seen["placement"] == {(0, 1): PARTIAL}
        assert not gm.meta  # and the graph is as it was
        assert all("placement" not in node.meta for node in gm.graph.nodes)

        annotate(gm, {"x_1": {"tp": shard(0)}}, mesh=TP, groups={"7": (0, 1)})
        assert gm.meta["groups"] == {"7": (0, 1)}
        checked(look, placements={"*": {"tp": PARTIAL}}, **JOB)(gm)  # what is there already stays
        assert seen["groups"] == {"7": (0, 1)}

    def test_groups_are_rows_of_a_grid_or_of_the_mesh(self) -> None:
        known = {"7": GroupFacts("tp", (0, 1)), "9": GroupFacts("dp", (0, 2))}
        mesh = mesh_for(known, 4)
        assert {dim.name: dim.groups for dim in mesh.dims} == {"tp": ((0, 1), (2, 3)), "dp": ((0, 2), (1, 3))}
        with pytest.raises(ProgramError, match="not a row of a grid of 4 ranks"):
            mesh_for({"7": GroupFacts("tp", (0, 3))}, 4)


def test_a_report_says_everything_in_a_few_lines() -> None:
    tally = Tally("mine", calls=3, changed=2, passed=1, refuted=1, inconclusive=1, cached=1, seconds=1.25)
    tally.rewrites["P1"] = 4
    tally.doubts["unsupported-op"] = 1
    tally.details["unsupported-op"] = "op my::op is not supported"
    tally.cases.append("reports/1/counterexample.json")
    assert str(tally).splitlines() == [
        "mine: refuted; 3 graphs, 2 changed, 1 passed, 1 refuted, 1 inconclusive, 1 cached; 1.2 s",
        "  rewrites: P1 4",
        "  inconclusive, unsupported-op: 1 graph (op my::op is not supported)",
        "  counterexample: reports/1/counterexample.json",
    ]
    assert Tally("idle").status == "nothing tested"


def test_copies_meet_other_ranks_by_names_of_their_own() -> None:
    """Replies stay in the store: a copy that counts on where its original stood would read those to other graphs."""
    one = checked(Identity(), mesh=Mesh.grid({"tp": 2}), report_dir=None)
    copies = [one, copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))]  # noqa: S301 - our own bytes
    assert len({each._channel for each in copies}) == 4
    assert all(each.report().calls == 0 for each in copies)
