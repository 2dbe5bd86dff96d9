"""What holds of programs that are drawn for DTensor."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from tcverify.execution import Lockstep
from tcverify.ops import qualified_name
from tcverify.program import Program, dumps, loads
from tcverify.pytorch.dtensor import DTensorProgram
from tcverify.registry.strategies import world_sizes_of
from tcverify.strategies import RESHARDING_WORLD_SIZES, WORLD_SIZES, dtensor_programs
from tcverify.strategies.dtensor.programs import DTENSOR_WORLD_SIZES, WIDTH, decode_dtensor, meshes
from tcverify.strategies.training.data_parallel import TRAINING_WORLD_SIZES
from tcverify.strategies.training.pipelines import PIPELINE_WORLD_SIZES
from tcverify.verification.verifier import verify


def sample(count: int, seed: int, gradients: bool | None = None) -> Iterator[Program]:
    """Programs of random bytes.

    Args:
        gradients: whether all of them return gradients, where they have any, or none; None leaves it to chance.
    """
    generator = random.Random(seed)
    for _ in range(count):
        mesh = generator.choice(meshes(generator.choice((2, 3, 4, 6, 8))))
        drawn = bytearray(generator.randbytes(WIDTH))
        drawn[1] = {None: drawn[1], True: 195 + drawn[1] % 60, False: drawn[1] % 60}[gradients]
        yield decode_dtensor(mesh, bytes(drawn))


def test_most_programs_run_and_are_what_their_bytes_say() -> None:
    finished = 0
    for program in sample(120, seed=1):
        finished += Lockstep().run(program).finished
        assert dumps(loads(dumps(program))) == dumps(program)
    assert finished >= 115  # kernels refuse some dtypes that shapes do not tell of


def test_any_bytes_decode() -> None:
    assert decode_dtensor(meshes(2)[0], b"").size >= 1
    assert decode_dtensor(meshes(2)[0], b"\xff" * WIDTH).size >= 1
    assert dumps(decode_dtensor(meshes(4)[0], b"\x11" * 9)) == dumps(decode_dtensor(meshes(4)[0], b"\x11" * 9))


def test_programs_divide_tensors_and_ops_are_of_many_kinds() -> None:
    ops, placed = Counter[str](), Counter[str]()
    for program in sample(200, seed=2):
        ops.update(str(node.target) for node in program.graphs[0].nodes if node.op == "call_function")
        placed.update(one for value in program.options.values() for one in str(value).split(","))
    assert len(ops) > 120
    assert min(placed[one] for one in ("R", "S0", "S1", "S2", "F0", "F1")) > 5


def test_ops_of_every_family_are_drawn_in_their_in_place_form() -> None:
    """On copies: DTensor distributes copies of inputs, too."""
    written = Counter[str]()
    for program in sample(1500, seed=4, gradients=False):
        for node in program.graphs[0].nodes:
            name = qualified_name(node.target).partition(".")[0]
            if node.op == "call_function" and name.endswith("_"):
                written[name.removeprefix("aten::")] += 1
                (target,) = node.all_input_nodes[:1]
                assert str(target.target) == "aten.clone.default"
    assert len(written) > 40
    assert {"masked_fill_", "lerp_", "mul_"} <= set(written)
    assert {"squeeze_", "unsqueeze_", "transpose_", "t_"} & set(written)


def test_gradients_are_those_of_autograd() -> None:
    """Of the loss that weighs the results with what the program is given as their gradients."""
    compared = 0
    drawn = zip(sample(60, seed=6, gradients=False), sample(60, seed=6, gradients=True), strict=True)
    for forward, program in drawn:
        ran = Lockstep().run(program, observe=True)
        # Calls that make tensors of a dtype mix it with the one that Lockstep computes in.
        if "gradients" in program.labels and ran.finished and "dtype" not in str(forward.graphs[0]):
            expected = differentiated(forward.graphs[0], ran.ranks[0].values or {})
            for one, other in zip(expected, ran.ranks[0].outputs, strict=True):
                torch.testing.assert_close(other, one, equal_nan=True)
            compared += 1
    assert compared > 20


def differentiated(graph: fx.Graph, values: dict[str, Any]) -> list[torch.Tensor]:
    """Results of a forward pass, and the gradients of what it reads, where it has any."""
    reduced = {node.args[0] for node in graph.nodes if "all_reduce" in str(node.target)}
    known: dict[fx.Node, Any] = {}
    read: list[torch.Tensor] = []
    for node in graph.nodes:
        if node.op == "placeholder" or "c10d" in str(node.target):
            known[node] = values[node.name].detach().clone()
            if node not in reduced and "all_reduce" not in str(node.target):
                read.append(known[node].requires_grad_(known[node].is_floating_point()))
        elif node.op == "call_function":
            call: Any = node.target
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), known.__getitem__)
            known[node] = call(*args, **kwargs)
    returned: Any = graph.output_node().args[0]
    results = [known[node] for node in returned]
    weights = (values[name] for name in values if name.startswith("grad"))
    floating = [one for one in results if one.is_floating_point()]
    sum((one * weight).sum() for one, weight in zip(floating, weights, strict=True)).backward()
    return [one.detach() for one in (*results, *(one.grad for one in read if one.grad is not None))]


def test_ops_of_backward_passes_are_drawn() -> None:
    ops = Counter[str]()
    for program in sample(150, seed=7, gradients=True):
        names = {qualified_name(node.target) for node in program.graphs[0].nodes if node.op == "call_function"}
        ops.update(name for name in names if "backward" in name)
        assert ("gradients" in program.labels) == any(spec.name.startswith("grad") for spec in program.inputs)
    assert len(ops) > 8
    assert not any("backward" in str(node.target) for p in sample(40, 7, gradients=False) for node in p.graphs[0].nodes)


def test_layouts_on_uneven_grids_are_drawn() -> None:
    """Grids of two sizes, sharded in the order of FSDP, of a dim that the ranks do not divide, with empty shards and without."""
    drawn = Counter[tuple[tuple[int, ...], str]]()
    for program in sample(1500, seed=3, gradients=False):
        sizes = tuple(len(dim.groups[0]) for dim in program.mesh.dims)
        for spec in program.inputs:
            rows = spec.shape[0] if spec.shape else 0
            if program.options.get(spec.name) == "F0,S0" and rows % program.world_size:
                drawn[sizes, "some" if rows > program.world_size else "none"] += 1
    assert {(sizes, how) for sizes in ((2, 3), (3, 2), (2, 4), (4, 2)) for how in ("some", "none")} <= set(drawn)


def test_each_strategy_draws_the_numbers_of_ranks_that_are_listed_for_it() -> None:
    assert set(world_sizes_of(["dtensor"])) == set(DTENSOR_WORLD_SIZES)
    assert set(world_sizes_of(["resharding"])) == set(RESHARDING_WORLD_SIZES)
    assert set(world_sizes_of(["pipelining"])) == set(PIPELINE_WORLD_SIZES)
    assert set(world_sizes_of(["training"])) == set(TRAINING_WORLD_SIZES)
    assert world_sizes_of(["mixed"]) == world_sizes_of([None]) == world_sizes_of([]) == WORLD_SIZES
    assert world_sizes_of(["dtensor", "resharding"]) == (2, 3, 4, 6)
    assert world_sizes_of(["resharding,mixed"]) == (2, 3, 4)


def test_dtensor_does_most_of_what_is_drawn() -> None:
    statuses = Counter(
        verify(DTensorProgram(), program, checks=["equivalence"]).status for program in sample(12, seed=4)
    )
    assert statuses["passed"] >= 6


def test_the_strategy_heeds_mesh_and_world_size() -> None:
    from hypothesis import find

    mesh = meshes(3)[0]
    assert find(dtensor_programs(mesh=mesh), lambda program: True).mesh == mesh
    assert find(dtensor_programs(world_size=8), lambda program: True).world_size == 8
