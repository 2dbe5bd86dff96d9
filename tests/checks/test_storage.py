"""What graphs hold in memory, as the checks see it."""

from __future__ import annotations

from tcverify.checks.memory.storage import memory_of
from tests.support.lowered import program


def test_a_storage_is_as_large_as_the_largest_value_in_it() -> None:
    (graph,) = program(lambda b: b.relu(b.call("aten::slice.Tensor", b.mm(b.x), 0, 1, 2))).graphs
    memory = memory_of(graph, {})
    names = [node.name for node in graph.nodes]
    (whole,) = memory.holds[names.index("mm")]
    assert memory.holds[names.index("slice_1")] == (whole,)
    assert memory.nbytes[whole] == 4 * 16
    assert memory.regions[names.index("mm")] == ((whole, 0, 64),)
    assert memory.regions[names.index("slice_1")] == ((whole, 16, 32),)
