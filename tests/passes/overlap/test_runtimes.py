"""Times of nodes, for passes that move them: from costs, from a device, the same on all ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tcverify.passes.overlap import align_runtimes, comm_graph, runtimes
from tests.support.overlap_programs import US, Builder, program


def build(b: Builder) -> Any:
    value = b.view(b.mm(b["x"], cost=7))
    return b.wait(b.start(value, cost=30))


def without_costs(b: Builder) -> Any:
    return b.wait(b.start(b.mm(b["x"], cost=None), cost=None))


def test_costs_are_taken_as_they_are() -> None:
    found = comm_graph(program(build).graph_module(0).graph)
    times = runtimes(found)
    assert times is not None
    given = {node.name: seconds for node, seconds in times.items() if seconds}
    assert given == {"mm": 7 * US, "all_reduce": 30 * US}
    assert list(times) == list(found.nodes)


def test_what_is_not_known_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert runtimes(comm_graph(program(without_costs).graph_module(0).graph)) is None
    assert "'mm'" in caplog.text


@pytest.mark.parametrize("cost", [math.nan, math.inf, "soon"])
def test_costs_that_are_no_time(cost: Any, caplog: pytest.LogCaptureFixture) -> None:
    graph = program(build, device="l4").graph_module(0).graph
    next(node for node in graph.nodes if node.name == "mm").meta["cost_s"] = cost
    with caplog.at_level("INFO"):
        assert runtimes(comm_graph(graph)) is None
    assert "not a time" in caplog.text


def test_a_device_estimates_the_rest() -> None:
    times = runtimes(comm_graph(program(without_costs, device="l4").graph_module(0).graph))
    assert times is not None
    assert {node.name for node, seconds in times.items() if seconds} == {"mm", "all_reduce"}


def test_an_unknown_device_is_none(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert runtimes(comm_graph(program(without_costs, device="abacus").graph_module(0).graph)) is None
    assert "abacus" in caplog.text


def test_medians_over_ranks() -> None:
    found = comm_graph(program(build).graph_module(0).graph)
    times = runtimes(found)
    assert times is not None
    assert align_runtimes(times) == times
    scaled = align_runtimes(times, lambda own: [[s * factor for s in own] for factor in (1, 3, 100)])
    assert scaled == {node: 3 * seconds for node, seconds in times.items()}
    even = align_runtimes(times, lambda own: [own, [s * 3 for s in own]])
    assert even == pytest.approx({node: 2 * seconds for node, seconds in times.items()})


def test_graphs_that_differ_between_ranks_are_not_aligned(caplog: pytest.LogCaptureFixture) -> None:
    times = runtimes(comm_graph(program(build).graph_module(0).graph))
    assert times is not None
    assert align_runtimes(times, lambda own: [own, own[:-1]]) == times
    assert "not aligned" in caplog.text
