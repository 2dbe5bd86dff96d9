"""What a pass is verified on of which nothing is known: programs of the strategies on which it has something to do."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import Phase, find, settings
from hypothesis.errors import NoSuchExample
from torch import fx

from tcverify.application import InProcess
from tcverify.application.loading import prepare_pass
from tcverify.campaign.in_flight import read_in_flight
from tcverify.cli.strategy_choice import ALL, FIRST, StrategyChoice, choose_strategies
from tcverify.errors import UsageError
from tcverify.passes import BUILTIN
from tcverify.program import Mesh, Program
from tcverify.registry.strategies import ALONE
from tcverify.strategies import DECODERS, STRATEGIES, join_strategy_names, programs_of

OTHERS = len(DECODERS) - 1


class Counting:
    """A pass of this test, and how many programs of 2 ranks it was given."""

    def __init__(self, rewrite: Callable[[fx.Graph], Any]) -> None:
        self.rewrite = rewrite
        self.calls = 0

    def __call__(self, module: fx.GraphModule) -> fx.GraphModule:
        self.calls += 1
        self.rewrite(module.graph)
        return module

    @property
    def programs(self) -> float:
        return self.calls / 2


def found(subject: Any, place: Path, world_size: int = 2, mesh: Mesh | None = None) -> StrategyChoice:
    return choose_strategies(InProcess(prepare_pass(subject, "", {})), place, f"{world_size} ranks", world_size, mesh)


def renames(name: str) -> Callable[[fx.Graph], None]:
    """Turns the calls of an op into relus, which is a change."""

    def rewrite(graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node.op == "call_function" and str(node.target).startswith(name):
                node.target, node.args, node.kwargs = torch.ops.aten.relu.default, node.args[:1], {}

    return rewrite


def test_a_pass_on_waits_gets_asynchronous_programs(tmp_path: Path) -> None:
    subject = Counting(renames("_c10d_functional.wait_tensor"))
    first = found(subject, tmp_path)
    names = first.strategy.split(",")
    assert names[0] == "mixed"
    assert {"functional", "traced"} <= set(names)
    assert {"structured", "wild", "resharding"}.isdisjoint(names)
    assert first.first == ()
    assert subject.programs == FIRST * OTHERS
    assert found(subject, tmp_path) == first
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["sequence_parallel", "multistream"])
def test_our_own_passes_would_get_what_is_known_to_suit_them(name: str, tmp_path: Path) -> None:
    names = found(BUILTIN[name](), tmp_path, 4, Mesh.grid({"dp": 2, "tp": 2})).strategy.split(",")
    assert {"sequence_parallel": "structured", "multistream": "overlap"}[name] in names
    assert "functional" not in names


def test_a_pass_that_never_fires_is_tried_longer_and_gets_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ALL > FIRST
    monkeypatch.setattr("tcverify.cli.strategy_choice.ALL", FIRST + 1)
    subject = Counting(lambda graph: None)
    assert found(subject, tmp_path) == StrategyChoice()
    assert subject.programs == (FIRST + 1) * OTHERS


def test_trying_takes_no_more_programs_than_what_comes_after(tmp_path: Path) -> None:
    for bound, programs in ((1, OTHERS), (2 * OTHERS + 1, 2 * OTHERS), (1000, FIRST * OTHERS)):
        subject = Counting(renames("_c10d_functional.wait_tensor"))
        made = choose_strategies(InProcess(prepare_pass(subject, "", {})), tmp_path, "2 ranks", 2, max_examples=bound)
        assert subject.programs == programs
        assert "functional" in made.names


@pytest.mark.parametrize(("changes", "seconds"), [("aten", 7), ("nobody", 23)])
def test_trying_takes_a_tenth_of_the_time_or_a_third_in_vain(
    changes: str, seconds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second for each program, of 70."""
    clock = itertools.count()
    monkeypatch.setattr("tcverify.cli.strategy_choice.time", SimpleNamespace(monotonic=lambda: next(clock)))
    subject = Counting(renames(changes))
    choose_strategies(InProcess(prepare_pass(subject, "", {})), tmp_path, "2 ranks", 2, max_time=70)
    assert subject.programs == seconds


def test_what_it_raises_on_is_verified_first(tmp_path: Path) -> None:
    def refuse(graph: fx.Graph) -> None:
        if any("fsdp" in str(node.target) for node in graph.nodes):
            raise KeyError("a bug")

    made = found(Counting(refuse), tmp_path)
    assert made.strategy == "mixed,fsdp"
    (case,) = made.first
    assert (case.mesh, case.reasons) == ("2 ranks", ("pass-raised",))
    assert any("fsdp" in str(node.target) for node in case.program.graphs[0].nodes)


def test_the_program_of_which_a_run_dies_is_on_disk(tmp_path: Path) -> None:
    class Death(BaseException):
        pass

    def die(graph: fx.Graph) -> None:
        if any("wait_tensor" in str(node.target) for node in graph.nodes):
            raise Death

    with pytest.raises(Death):
        found(Counting(die), tmp_path)
    (left,) = tmp_path.iterdir()
    kept = read_in_flight(left).program
    assert any("wait_tensor" in str(node.target) for node in kept.graphs[0].nodes)


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        found(Counting(lambda graph: signal.raise_signal(signal.SIGINT)), tmp_path)
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------------------- several strategies as one


#: A few programs, none of them made smaller.
FEW = settings(max_examples=40, database=None, phases=[Phase.generate])


def holds(op: str) -> Callable[[Program], bool]:
    return lambda program: any(op in str(node.target) for graph in program.graphs for node in graph.nodes)


@pytest.mark.parametrize("mesh", [None, Mesh.grid({"tp": 2})])
def test_programs_of_each_strategy_are_drawn(mesh: Mesh | None) -> None:
    both = programs_of(join_strategy_names(["structured", "functional"]), mesh, None if mesh is not None else 2)
    for op in ("tensor_cast", "_c10d_functional"):
        program = find(both, holds(op), settings=FEW)
        assert program.world_size == 2
        assert mesh is None or program.mesh == mesh


def test_programs_stay_on_the_mesh_that_is_asked_for() -> None:
    mesh = Mesh.grid({"tp": 2})
    with pytest.raises(NoSuchExample):
        find(programs_of("mixed,resharding,structured", mesh), lambda program: program.mesh != mesh, settings=FEW)


def test_names_come_once_and_what_stands_alone_is_refused() -> None:
    assert join_strategy_names(["wild", "wild"]) == "wild"
    assert join_strategy_names(["wild", "moe", "wild"]) == "wild,moe"
    assert join_strategy_names(["dtensor"]) == "dtensor"
    with pytest.raises(UsageError, match="strategy 'dtensor' cannot be drawn from together with others"):
        join_strategy_names(["wild", "dtensor"])
    assert set(ALONE) == set(STRATEGIES) - set(DECODERS)
