"""`wait_tensors`, which torch 2.15 emits behind coalesced collectives: one wait for all that is under way to a list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from tcverify import verify
from tcverify.execution import Lockstep, ProcessGroupPool
from tcverify.execution.asynchrony import TIMINGS
from tcverify.program import PARTIAL, GraphBuilder, InputSpec, Mesh, Program, dumps, loads, spmd_program

X = InputSpec("x", (6, 4), placements=(("tp", PARTIAL),))


def program() -> Program:
    """Two results of a coalesced call, waited for at once; then a write into an operand of it."""

    def build(b: GraphBuilder) -> Any:
        x = b.input("x")
        y = b.call("aten::mul.Tensor", x, 3.0)
        both = b.call("_c10d_functional::reduce_scatter_tensor_coalesced", [x, y], "sum", 2, "tp")
        arrived = b.call("_c10d_functional::wait_tensors", [b.getitem(both, 0), b.getitem(both, 1)])
        first, second = (b.getitem(arrived, i) for i in (0, 1))
        b.call("aten::add_.Tensor", y, 1.0)
        return b.call("aten::sub.Tensor", first, second), y

    return spmd_program(Mesh.grid({"tp": 2}), [X], build)


def named(gm: fx.GraphModule) -> dict[str, fx.Node]:
    return {node.name: node for node in gm.graph.nodes}


@pytest.mark.parametrize("timing", TIMINGS)
def test_the_list_has_arrived_whenever_it_was_under_way(timing: str) -> None:
    made = program()
    total = sum(made.values(rank)[0].double() for rank in range(2))
    run = Lockstep().run(made, timing=timing)
    assert run.finished, run.why
    for rank, result in enumerate(run.ranks):
        torch.testing.assert_close(result.outputs[0], -2 * total[3 * rank : 3 * rank + 3])
        torch.testing.assert_close(result.outputs[1], 3 * made.values(rank)[0].double() + 1)


def test_process_groups_wait_for_it_too(pool: Callable[[int], ProcessGroupPool]) -> None:
    here, there = Lockstep().run(program()), pool(2).run(program())
    assert there.finished, there.why
    for mine, theirs in zip(here.ranks, there.ranks, strict=True):
        torch.testing.assert_close(mine.outputs, theirs.outputs)


def test_it_can_be_written_down() -> None:
    made = program()
    assert dumps(loads(dumps(made))) == dumps(made)


def sinks_the_wait(gm: fx.GraphModule) -> None:
    nodes = named(gm)
    at = nodes["add_"]
    for name in ("wait_tensors", "getitem_2", "getitem_3"):
        at.append(nodes[name])
        at = nodes[name]


def waits_for_one(gm: fx.GraphModule) -> None:
    nodes = named(gm)
    nodes["wait_tensors"].args = ([nodes["getitem"]],)
    nodes["getitem_3"].replace_all_uses_with(nodes["getitem_1"])
    gm.graph.erase_node(nodes["getitem_3"])


@pytest.mark.parametrize(
    ("broken", "kind"),
    [(sinks_the_wait, "async-race"), (waits_for_one, "missing-wait")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_what_is_done_to_it_wrongly_is_found(broken: Callable[[fx.GraphModule], None], kind: str) -> None:
    verdict = verify(broken, program())
    assert verdict.status == "refuted"
    assert kind in {finding.kind for finding in verdict.findings}


def waits_one_by_one(gm: fx.GraphModule) -> None:
    """As older versions of torch wrote it."""
    nodes = named(gm)
    for old, item in (("getitem_2", "getitem"), ("getitem_3", "getitem_1")):
        with gm.graph.inserting_before(nodes["wait_tensors"]):
            single = gm.graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (nodes[item],))
        single.meta["val"] = nodes[item].meta["val"]
        nodes[old].replace_all_uses_with(single)
        gm.graph.erase_node(nodes[old])
    gm.graph.erase_node(nodes["wait_tensors"])


def reads_the_storage_that_has_arrived(gm: fx.GraphModule) -> None:
    """What was waited for has arrived under the name of the start as well."""
    nodes = named(gm)
    nodes["getitem_2"].replace_all_uses_with(nodes["getitem"])


@pytest.mark.parametrize(
    "sound", [waits_one_by_one, reads_the_storage_that_has_arrived], ids=lambda value: value.__name__
)
def test_what_is_sound_passes(sound: Callable[[fx.GraphModule], None]) -> None:
    verdict = verify(sound, program())
    assert verdict.status == "passed", [str(one) for one in (*verdict.findings, *verdict.doubts)]
