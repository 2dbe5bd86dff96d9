"""Programs of collectives that are alike but for one thing: legal whatever the bytes, and they tell sound merges from others."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import fx

from tcverify.application import InProcess
from tcverify.application.loading import prepare
from tcverify.program import Program
from tcverify.strategies import DECODERS, all_meshes
from tcverify.strategies.alike import WIDTH
from tcverify.verifier import Verdict, verify

C10D = torch.ops._c10d_functional
ADD = torch.ops.aten.add.Tensor


def sample(count: int, seed: int) -> list[Program]:
    generator = random.Random(seed)
    meshes = [mesh for size in (2, 4) for mesh in all_meshes(size)]
    return [DECODERS["alike"].decode(generator.choice(meshes), generator.randbytes(WIDTH)) for _ in range(count)]


def test_every_program_runs_and_each_kind_is_drawn() -> None:
    programs = sample(60, seed=1)
    nothing = InProcess(prepare(lambda gm: None, "", {}))
    for program in programs[:25]:
        verdict = verify(nothing, program)
        assert verdict.status == "passed", (program.labels, verdict.doubts)
    labels = Counter(label for program in programs for label in program.labels)
    for label in ("twins but write", "twins but group", "twins but reduction", "twins but nothing", "part: own"):
        assert labels[label], label


def test_the_smallest_program_has_two_collectives() -> None:
    for mesh in all_meshes(2):
        program = DECODERS["alike"].decode(mesh, b"")
        assert sum(node.target is C10D.all_reduce.default for node in program.graph(0).nodes) >= 2


# ------------------------------------------------------------------------------------------- passes that merge and share


def merge(gm: fx.GraphModule, *, same_group: bool = True, sums_only: bool = True) -> None:
    """all_reduce(a) + all_reduce(b) ⇒ all_reduce(a + b)"""
    graph = gm.graph
    for node in graph.find_nodes(op="call_function", target=ADD):
        waits = [arg for arg in node.args[:2] if getattr(arg, "target", None) is C10D.wait_tensor.default]
        starts: Any = [wait.args[0] for wait in waits if len(wait.users) == 1 and len(wait.args[0].users) == 1]
        if len(set(starts)) != 2 or any(one.target is not C10D.all_reduce.default for one in starts) or node.kwargs:
            continue
        one, two = starts
        if (same_group and one.args[2] != two.args[2]) or (sums_only and {one.args[1], two.args[1]} != {"sum"}):
            continue
        between = list(graph.nodes)
        between = between[min(map(between.index, starts)) : between.index(node)]
        if any("_." in str(other.target) for other in between):
            continue
        with graph.inserting_before(node):
            total = graph.call_function(ADD, (one.args[0], two.args[0]))
            start = graph.call_function(C10D.all_reduce.default, (total, *one.args[1:]))
            wait = graph.call_function(C10D.wait_tensor.default, (start,))
        total.meta["val"] = torch.empty_like(node.meta["val"])
        start.meta["val"] = wait.meta["val"] = torch.empty_like(node.meta["val"])
        node.replace_all_uses_with(wait)
        for dead in (node, *waits, *starts):
            graph.erase_node(dead)
    gm.recompile()


def share(gm: fx.GraphModule, *, writes_count: bool = True, groups_count: bool = True) -> None:
    """An all_gather that has been made and waited for already is not made again."""
    graph = gm.graph
    made: dict[Any, fx.Node] = {}
    returned = set(graph.find_nodes(op="output")[0].all_input_nodes)
    for node in list(graph.nodes):
        if node.target is C10D.all_gather_into_tensor.default:
            key = node.args if groups_count else node.args[:2]
            (wait,) = node.users
            if key in made and not {wait, made[key]} <= returned:
                wait.replace_all_uses_with(made[key])
                graph.erase_node(wait)
                graph.erase_node(node)
            elif key not in made and node.next is wait:
                made[key] = wait
        elif writes_count and "_." in str(node.target) and "c10d" not in str(node.target):
            made.clear()
    gm.recompile()


def verdicts(count: int, function: Any, **options: bool) -> list[Verdict]:
    subject = InProcess(prepare(lambda gm: function(gm, **options), "", {}))
    return [verify(subject, program) for program in sample(count, seed=2)]


@pytest.mark.parametrize(("function", "least"), [(merge, 8), (share, 4)])
def test_sound_passes_fire_and_are_not_refuted(function: Any, least: int) -> None:
    found = verdicts(80, function)
    for verdict in found:
        assert verdict.status == "passed", [finding.title for finding in verdict.findings]
    assert sum(verdict.changed for verdict in found) >= least


@pytest.mark.parametrize(
    ("function", "option"),
    [(merge, "same_group"), (merge, "sums_only"), (share, "writes_count"), (share, "groups_count")],
)
def test_passes_that_forget_to_ask_are_refuted(function: Any, option: str) -> None:
    kinds = {finding.kind for verdict in verdicts(120, function, **{option: False}) for finding in verdict.findings}
    assert kinds & {"wrong-value", "wrong-shape"}, kinds
