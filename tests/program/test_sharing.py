"""Distinct graphs among those of all ranks."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from tcverify.program.graph import RankConstant, bind
from tcverify.program.sharing import share

aten = torch.ops.aten


def graph(*constants: Any, target: Any = aten.add.Tensor, name: str = "x") -> fx.Graph:
    """A chain of calls, one per constant, each with the constant as its second argument."""
    made = fx.Graph()
    value = made.placeholder(name)
    for constant in constants:
        value = made.call_function(target, (value, constant))
    made.output(value)
    return made


def constants_of(shared: fx.Graph) -> list[Any]:
    return [node.args[1] for node in shared.nodes if node.op == "call_function"]


def nothing(count: int) -> list[dict[str, Any]]:
    return [{} for _ in range(count)]


def test_equal_graphs_are_stored_once_without_constants() -> None:
    shared, ranks = share([graph(1, 2) for _ in range(4)], nothing(4))
    assert len(shared) == 1
    assert [(r.graph, r.constants) for r in ranks] == [(0, {})] * 4


def test_an_integer_that_differs_becomes_a_rank_constant() -> None:
    shared, ranks = share([graph(0, 7), graph(1, 7)], nothing(2))
    assert constants_of(shared[0]) == [RankConstant("c0"), 7]
    assert [r.constants for r in ranks] == [{"c0": 0}, {"c0": 1}]


def test_a_rank_in_the_middle_may_be_the_one_that_differs() -> None:
    _, ranks = share([graph(4), graph(5), graph(4)], nothing(3))
    assert [r.constants for r in ranks] == [{"c0": 4}, {"c0": 5}, {"c0": 4}]


def test_the_last_rank_may_be_the_one_that_differs() -> None:
    _, ranks = share([graph(4), graph(4), graph(5)], nothing(3))
    assert [r.constants for r in ranks] == [{"c0": 4}, {"c0": 4}, {"c0": 5}]


def test_a_list_that_differs_becomes_a_rank_constant() -> None:
    shared, ranks = share([graph([0, 2]), graph([1, 3])], nothing(2))
    assert constants_of(shared[0]) == [RankConstant("c0")]
    assert [r.constants["c0"] for r in ranks] == [[0, 2], [1, 3]]


def test_lists_of_different_length_become_one_rank_constant() -> None:
    shared, ranks = share([graph([0]), graph([1, 2]), graph([1, 2])], nothing(3))
    assert len(shared) == 1
    assert [r.constants["c0"] for r in ranks] == [[0], [1, 2], [1, 2]]


def test_equal_columns_share_a_name() -> None:
    shared, ranks = share([graph(0, 5, 0), graph(1, 6, 1)], nothing(2))
    assert constants_of(shared[0]) == [RankConstant("c0"), RankConstant("c1"), RankConstant("c0")]
    assert ranks[1].constants == {"c0": 1, "c1": 6}


def test_known_names_are_used_again() -> None:
    known = [{"rank": 0, "tp": [0, 1]}, {"rank": 1, "tp": [0, 1]}]
    shared, ranks = share([graph(0, 5), graph(1, 6)], known)
    assert constants_of(shared[0]) == [RankConstant("rank"), RankConstant("c0")]
    assert ranks[1].constants == {"rank": 1, "c0": 6}


def test_a_new_name_is_not_a_known_one() -> None:
    shared, _ = share([graph(5), graph(6)], [{"c0": 1}, {"c0": 2}])
    assert constants_of(shared[0]) == [RankConstant("c1")]


@pytest.mark.parametrize(
    "other",
    [
        lambda: graph(1, 2, 3),
        lambda: graph(1, 2, target=aten.sub.Tensor),
        lambda: graph(1, 2, name="y"),
        lambda: graph(1, 2.0),
        lambda: graph(1, True),
        lambda: graph(1, [2]),
        lambda: graph(1, None),
    ],
)
def test_graphs_that_differ_in_more_than_integers_stay_apart(other: Callable[[], fx.Graph]) -> None:
    shared, ranks = share([graph(1, 2), other(), graph(5, 6)], nothing(3))
    assert len(shared) == 2
    assert [r.graph for r in ranks] == [0, 1, 0]


def test_metadata_keeps_graphs_apart() -> None:
    marked = graph(1)
    next(iter(marked.nodes)).meta["sp_local"] = True
    shared, _ = share([graph(1), marked], nothing(2))
    assert len(shared) == 2


def test_operands_keep_graphs_apart() -> None:
    def difference(swapped: bool) -> fx.Graph:
        made = fx.Graph()
        a, b = made.placeholder("a"), made.placeholder("b")
        made.output(made.call_function(aten.sub.Tensor, (b, a) if swapped else (a, b)))
        return made

    assert len(share([difference(False), difference(True)], nothing(2))[0]) == 2


@pytest.mark.parametrize(
    "values",
    [[0, 1, 2], [[0, 1], [1, 0], [2]], [slice(0, 2), slice(2, 4), slice(4, 6)], [(0, None), (1, None), (2, None)]],
    ids=str,
)
def test_binding_gives_every_rank_its_graph_again(values: list[Any]) -> None:
    graphs = [graph(value, 9) for value in values]
    shared, ranks = share(graphs, nothing(3))
    assert len(shared) == 1
    for original, binding in zip(graphs, ranks, strict=True):
        assert str(bind(shared[binding.graph], binding.constants)) == str(original)


def test_a_graph_of_one_rank_alone_has_no_constants() -> None:
    shared, ranks = share([graph(3)], nothing(1))
    assert constants_of(shared[0]) == [3]
    assert ranks[0].constants == {}


def test_the_graphs_that_were_given_stay_as_they_were() -> None:
    graphs = [graph(0), graph(1)]
    share(graphs, nothing(2))
    assert [constants_of(g) for g in graphs] == [[0], [1]]


def test_a_thousand_ranks_share_one_graph() -> None:
    shared, ranks = share([graph(rank, 1) for rank in range(1000)], nothing(1000))
    assert len(shared) == 1
    assert ranks[999].constants == {"c0": 999}


def test_tuples_stay_tuples() -> None:
    """As an index, (0, 1) picks an element and [0, 1] picks rows."""
    graphs = [graph((0, rank), target=operator.getitem) for rank in range(2)]
    shared, bindings = share(graphs, nothing(2))
    assert len(shared) == 1
    for rank, binding in enumerate(bindings):
        call = next(n for n in bind(shared[0], binding.constants).nodes if n.op == "call_function")
        assert call.args[1] == (0, rank)
        assert isinstance(call.args[1], tuple)
