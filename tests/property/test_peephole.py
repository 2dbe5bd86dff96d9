"""Patterns for peephole passes: legal whatever the bytes, and they tell sound passes from those that forget to ask."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import fx

from tcverify.application import InProcess
from tcverify.application.loading import prepare_pass
from tcverify.program import Program
from tcverify.strategies import DECODERS, all_meshes
from tcverify.strategies.functional.peephole import WIDTH
from tcverify.verification.verifier import Verdict, verify
from tests.sizes import by_night

C10D = torch.ops._c10d_functional
ADD = torch.ops.aten.add.Tensor

#: What these mistakes are found as.
SHOWS = {"wrong-value", "wrong-shape", "wrong-alias", "missing-wait", "async-race"}


def sample(count: int, seed: int) -> list[Program]:
    generator = random.Random(seed)
    meshes = [mesh for size in (2, 4) for mesh in all_meshes(size)]
    return [DECODERS["peephole"].decode(generator.choice(meshes), generator.randbytes(WIDTH)) for _ in range(count)]


def test_every_program_runs_and_each_kind_is_drawn() -> None:
    programs = sample(60, seed=1)
    nothing = InProcess(prepare_pass(lambda gm: None, "", {}))
    for program in programs[:25]:
        verdict = verify(nothing, program)
        assert verdict.status == "passed", (program.labels, verdict.doubts)
    labels = Counter(label for program in programs for label in program.labels)
    for label in (
        "twins but write",
        "twins but group",
        "twins but reduction",
        "twins but nothing",
        "part: own",
        "part of all_reduce",
        "all_gather of reduce_scatter",
    ):
        assert labels[label], label


def test_the_smallest_program_has_two_collectives() -> None:
    for mesh in all_meshes(2):
        program = DECODERS["peephole"].decode(mesh, b"")
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


def scatter(gm: fx.GraphModule, *, own_part: bool = True, rows_only: bool = True) -> None:
    """This rank's rows of an all_reduce ⇒ reduce_scatter. A rank cannot see that others take theirs as well."""
    graph = gm.graph
    for part in graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor):
        wait, dim, start, end = part.args
        start_node = wait.args[0] if getattr(wait, "target", None) is C10D.wait_tensor.default else None
        if getattr(start_node, "target", None) is not C10D.all_reduce.default:
            continue
        operand, op, name = start_node.args
        members = gm.meta["groups"][name]
        rows = part.meta["val"].shape[0]
        mine = members.index(gm.meta["rank"]) * rows
        if (rows_only and dim != 0) or (own_part and (start, end) != (mine, mine + rows)) or len(members) == 1:
            continue
        if operand.meta["val"].shape[dim] != part.meta["val"].shape[dim] * len(members):
            continue
        between = list(graph.nodes)
        if any("_." in str(o.target) for o in between[between.index(start_node) : between.index(part)]):
            continue
        with graph.inserting_before(part):
            made = graph.call_function(C10D.reduce_scatter_tensor.default, (operand, op, len(members), name))
            waited = graph.call_function(C10D.wait_tensor.default, (made,))
        for node in (made, waited):
            node.meta["val"] = torch.empty_like(part.meta["val"])
        part.replace_all_uses_with(waited)
        graph.erase_node(part)
        if not wait.users:
            graph.erase_node(wait)
            graph.erase_node(start_node)
    gm.recompile()


def join(gm: fx.GraphModule, *, same_group: bool = True, readers_count: bool = True) -> None:
    """all_gather(reduce_scatter(x)) ⇒ all_reduce(x)"""
    graph = gm.graph
    for gather in graph.find_nodes(op="call_function", target=C10D.all_gather_into_tensor.default):
        wait = gather.args[0]
        scatter = wait.args[0] if getattr(wait, "target", None) is C10D.wait_tensor.default else None
        if getattr(scatter, "target", None) is not C10D.reduce_scatter_tensor.default:
            continue
        operand, op, _, name = scatter.args
        if (same_group and gather.args[2] != name) or (readers_count and len(wait.users) > 1):
            continue
        with graph.inserting_before(gather):
            made = graph.call_function(C10D.all_reduce.default, (operand, op, name))
        made.meta["val"] = torch.empty_like(gather.meta["val"])
        gather.replace_all_uses_with(made)
        graph.erase_node(gather)
        if not wait.users:
            graph.erase_node(wait)
            graph.erase_node(scatter)
    gm.recompile()


def drop(gm: fx.GraphModule, *, effects_count: bool = True, waits_count: bool = True) -> None:
    """Dead code, and collectives with it: all ranks drop the same ones."""
    for node in reversed(gm.graph.nodes):
        if node.op != "call_function" or node.users:
            continue
        writes = "_." in str(node.target) and "c10d" not in str(node.target)
        in_place = node.target is C10D.wait_tensor.default and node.args[0].target is C10D.all_reduce_.default
        if not ((effects_count and writes) or (waits_count and in_place) or node.target is C10D.all_reduce_.default):
            gm.graph.erase_node(node)
    gm.recompile()


def average(gm: fx.GraphModule, *, group_counts: bool = True, readers_count: bool = True) -> None:
    """all_reduce(x, sum) / size of the group ⇒ all_reduce(x, avg)"""
    graph = gm.graph
    world = max(rank for ranks in gm.meta["groups"].values() for rank in ranks) + 1
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.div.Tensor):
        wait, by = node.args
        start = wait.args[0] if getattr(wait, "target", None) is C10D.wait_tensor.default else None
        if getattr(start, "target", None) is not C10D.all_reduce.default or start.args[1] != "sum":
            continue
        size = len(gm.meta["groups"][start.args[2]]) if group_counts else world
        if by == size and not (readers_count and len(wait.users) > 1):
            start.args = (start.args[0], "avg", start.args[2])
            node.replace_all_uses_with(wait)
            graph.erase_node(node)
    gm.recompile()


def reinplace(
    gm: fx.GraphModule, *, views_count: bool = True, inputs_count: bool = True, flight_counts: bool = True
) -> None:
    """add ⇒ add_ where nobody reads the operand again, nor what shares its memory; a collective reads until it is waited for."""
    graph, order = gm.graph, {node: number for number, node in enumerate(gm.graph.nodes)}
    tensors = [node for node in graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    memory = {node: node.meta["val"].untyped_storage()._cdata for node in tensors}
    for node in graph.find_nodes(op="call_function", target=ADD):
        operand, other = node.args
        ours, made = operand.meta["val"], node.meta["val"]
        if node.kwargs or operand is other or (ours.shape, ours.dtype) != (made.shape, made.dtype):
            continue
        sharing = {one for one in tensors if memory[one] == memory[operand]} if views_count else {operand}
        readers = {user for one in sharing for user in one.users}
        if flight_counts:
            readers |= {user for reader in readers for user in reader.users if user.target is C10D.wait_tensor.default}
        given = any(one.op == "placeholder" for one in sharing)
        if (inputs_count and given) or any(order[reader] > order[node] for reader in readers):
            continue
        node.target = torch.ops.aten.add_.Tensor
        node.meta["val"] = ours
    gm.recompile()


def verdicts(count: int, function: Any, fits: Callable[[Program], bool], **options: bool) -> Iterator[Verdict]:
    subject = InProcess(prepare_pass(lambda gm: function(gm, **options), "", {}))
    return (verify(subject, program) for program in sample(count, seed=2) if fits(program))


def kinds(found: Iterable[Verdict]) -> Iterator[str]:
    return (finding.kind for verdict in found for finding in verdict.findings)


def anything(program: Program) -> bool:
    return True


def own_parts(program: Program) -> bool:
    """Whether every part that is taken is the rank's own."""
    return not any(label.startswith("part: ") and label != "part: own" for label in program.labels)


@pytest.mark.parametrize(
    ("function", "least"),
    [
        (merge, 8),
        (share, 4),
        (scatter, 3),
        (join, 4),
        (drop, 12),
        (average, 4),
        (reinplace, 20),
    ],
)
def test_sound_passes_fire_and_are_not_refuted(function: Any, least: int) -> None:
    count = by_night(100, 50)
    found = list(verdicts(count, function, own_parts if function is scatter else anything))
    for verdict in found:
        assert verdict.status == "passed", [finding.title for finding in verdict.findings]
    assert sum(verdict.changed for verdict in found) >= least * count / 100


@pytest.mark.parametrize(
    ("function", "option"),
    [
        (merge, "same_group"),
        (merge, "sums_only"),
        (share, "writes_count"),
        (share, "groups_count"),
        (scatter, "own_part"),
        (scatter, "rows_only"),
        (join, "same_group"),
        (average, "group_counts"),
        (average, "readers_count"),
        (reinplace, "views_count"),
        (reinplace, "inputs_count"),
        (reinplace, "flight_counts"),
        (drop, "effects_count"),
        (drop, "waits_count"),
    ],
)
def test_passes_that_forget_to_ask_are_refuted(function: Any, option: str) -> None:
    found = verdicts(240, function, anything, **{option: False})
    assert any(kind in SHOWS for kind in kinds(found))


def test_what_each_rank_decides_by_its_own_numbers_is_refuted() -> None:
    """Where all ranks take the first part, that is the own one on the first rank alone."""
    assert "collective-mismatch" in kinds(verdicts(100, scatter, anything))
