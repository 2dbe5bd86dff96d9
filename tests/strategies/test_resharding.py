"""Programs that are brought from mesh to mesh: every row of the decision table, every sort of mesh and every motif is reached."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch.utils import _pytree as pytree

from tcverify.execution import Lockstep
from tcverify.ops import DeviceMesh, Layout, Resharding, qualified_name
from tcverify.program import Mesh, MeshDim, PlacedPlan, Program, dumps
from tcverify.strategies import RESHARDING_WORLD_SIZES
from tcverify.strategies.resharding.choices import (
    HEADER,
    KINDS,
    MESHES,
    RECORD,
    RECORDS,
    fitting_mesh,
    grid_of,
    mesh_of,
)
from tcverify.strategies.resharding.decision_table import row_of
from tcverify.strategies.resharding.motifs import MOTIFS
from tcverify.strategies.resharding.programs import WIDTH, decode_resharding, plan_of
from tcverify.strategies.resharding.table_rows import ROWS, SUMS


def drawn(world_size: int, *records: dict[str, object], **header: object) -> PlacedPlan:
    """The plan of a header and records, by fields of their tables."""
    first = bytes(HEADER[name].index(header.get(name, table[0])) for name, table in HEADER.items())
    tables = {**RECORD, "kind": KINDS[str(header.get("theme", "any"))]}
    rows = [bytes(table.index(record.get(name, table[0])) for name, table in tables.items()) for record in records]
    return plan_of(world_size, first + b"".join(rows))


def sample(count: int, seed: int) -> Iterator[tuple[PlacedPlan, Program]]:
    generator = random.Random(seed)
    for _ in range(count):
        plan = plan_of(generator.choice(RESHARDING_WORLD_SIZES), generator.randbytes(WIDTH))
        yield plan, plan.build()


def asked(plan: PlacedPlan) -> list[Resharding]:
    """What the sets and reductions of a plan ask for."""
    _, tensors = plan.tensors()
    found = []
    for step in plan.steps:
        if step.reshards:
            operand = tensors[step.reads[0]]
            dim, reduction = step.args[1:] if len(step.args) > 1 else (None, None)
            found.append(Resharding(operand.layout, step.layout, operand.shape, dim, reduction))
    return found


# ------------------------------------------------------------------------------------------------------------ decoding


def test_every_kind_has_a_motif_and_every_theme_begins_with_none() -> None:
    assert {kind for table in KINDS.values() for kind in table} == {"none", *MOTIFS}
    assert all(table[0] == "none" for table in KINDS.values())
    assert set(HEADER["theme"]) == set(KINDS)
    assert set(RECORD["row"]) == set(ROWS)
    assert set(RECORD["sum"]) == set(SUMS)


@pytest.mark.parametrize("world_size", range(2, 7))
def test_no_choices_return_an_input_of_two_ranks(world_size: int) -> None:
    plan = plan_of(world_size, b"")
    assert (plan.steps, plan.outputs) == ((), ("x0",))
    assert str(plan.inputs[0].layout) == "[0, 1] shard(0)"


def test_of_the_mesh_that_is_drawn_on_only_the_number_of_ranks_counts() -> None:
    choices = random.Random(3).randbytes(WIDTH)
    uneven = Mesh(4, (MeshDim("tp", ((0,), (3, 1, 2))),))
    assert dumps(decode_resharding(uneven, choices)) == dumps(decode_resharding(Mesh.grid({"tp": 4}), choices))


@pytest.mark.parametrize("world_size", range(1, 7))
def test_every_number_is_a_mesh_of_the_sort(world_size: int) -> None:
    for sort, number in itertools.product(sorted(set(MESHES)), range(0, 3000, 7)):
        mesh = mesh_of(world_size, sort, number)
        assert set(mesh.ranks) <= set(range(world_size))
        if sort == "subset":
            assert list(mesh.ranks) == sorted(mesh.ranks)
        if sort in ("pair", "single"):
            assert mesh.size == min(world_size, 2 if sort == "pair" else 1)


def test_every_order_of_some_ranks_is_a_mesh() -> None:
    found = {mesh_of(4, "ordered", number) for number in range(4 * 24)}
    assert len(found) == 4 + 12 + 24 + 24


def test_a_grid_has_two_dims_and_the_simplest_is_square() -> None:
    assert grid_of(4, 0) == DeviceMesh((2, 2), (0, 1, 2, 3))
    shapes = {grid_of(6, number).shape for number in range(20)}
    assert {(2, 2), (2, 3), (3, 2), (1, 6), (2, 1)} <= shapes


def test_meshes_are_cut_to_what_divides() -> None:
    mesh = DeviceMesh.of(3, 0, 2, 1)
    assert fitting_mesh(mesh, 6) == DeviceMesh.of(3, 0, 2)
    assert fitting_mesh(mesh, 7) is None
    assert fitting_mesh(DeviceMesh.of(2), 7) == DeviceMesh.of(2)


# ---------------------------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize(
    ("source", "target", "row"),
    [
        ("[0, 1] replicated", "[0, 1, 2] shard(0)", "scatter"),
        ("[0] shard(0)", "[0, 1] shard(0)", "scatter"),
        ("[0, 1] shard(0)", "[0, 1] replicated", "allgather"),
        ("[0, 1] shard(0)", "[1, 0] replicated", "gather"),
        ("[0, 1] shard(0)", "[2] shard(0)", "gather"),
        ("[0, 1] shard(0)", "[2, 1] shard(0)", "send-recv"),
        ("[0, 1] shard(0)", "[0, 1] shard(1)", "all-to-all"),
        ("[0, 1] shard(0)", "[0, 1, 2] shard(0)", "unequal-send-recv"),
        ("[0] replicated", "[1] shard(0)", "broadcast"),
        ("[0, 1] replicated", "[1, 0] replicated", "broadcast"),
        ("[0, 1] replicated", "[0, 1] shard(1)", "chunk"),
        ("[0, 1] shard(0)", "[0, 1] shard(0)", "local"),
        ("[[0, 1], [2, 3]] shard(0), replicated", "[[0, 1], [2, 3]] replicated, replicated", "grid-allgather"),
        ("[[0, 1], [2, 3]] shard(0), replicated", "[[0, 1], [2, 3]] shard(1), replicated", "grid-all-to-all"),
        ("[[0, 1], [2, 3]] replicated, shard(0)", "[[0, 1], [2, 3]] shard(1), shard(0)", "grid-chunk"),
        ("[[0, 1], [2, 3]] shard(0), shard(1)", "[[0, 1], [2, 3]] replicated, replicated", "grid-several"),
        ("[[0, 1], [2, 3]] shard(0), shard(1)", "[0, 1] shard(0)", "grid-moved"),
    ],
)
def test_sets_by_what_they_take(source: str, target: str, row: str) -> None:
    assert row_of(Resharding(Layout.parse(source), Layout.parse(target), (12, 12))) == row


@pytest.mark.parametrize(
    ("source", "target", "row"),
    [
        ("[0, 1] shard(0)", "[0, 1] replicated", "allreduce"),
        ("[0, 1] shard(0)", "[0, 1] shard(0)", "reduce-scatter"),
        ("[0, 1] shard(0)", "[1, 0] shard(0)", "reduce-scatter-across"),
        ("[0, 1] shard(0)", "[2, 1] replicated", "reduce"),
        ("[0] shard(0)", "[1] replicated", "reduce"),
        ("[0, 1] shard(1)", "[0, 1] shard(0)", "local-sum"),
        ("[0, 1] replicated", "[2] replicated", "unsharded-sum"),
        ("[[0, 1], [2, 3]] shard(0), shard(1)", "[[0, 1], [2, 3]] replicated, shard(0)", "grid-allreduce"),
        ("[[0, 1], [2, 3]] shard(0), replicated", "[[0, 1], [2, 3]] shard(0), replicated", "grid-reduce-scatter"),
    ],
)
def test_reductions_by_what_they_take(source: str, target: str, row: str) -> None:
    assert row_of(Resharding(Layout.parse(source), Layout.parse(target), (12, 12), 0, "sum")) == row


@pytest.mark.parametrize("world_size", range(2, 7))
@pytest.mark.parametrize("row", [row for row in ROWS if row not in ("odd", "local")])
def test_a_record_writes_its_row_whatever_else_it_says(row: str, world_size: int) -> None:
    fields = {
        "a": (0, 2),
        "mesh": ("pair", "full", "single", "ordered"),
        "where_low": (0, 7, 250),
        "how": (1, 7, 15, 40),
    }
    for values in itertools.product(*fields.values()):
        record = {"kind": "set", "row": row, **dict(zip(fields, values, strict=True))}
        found = [row_of(made) for made in asked(drawn(world_size, record))]
        if row == "send-recv" and record["how"] == 1:
            assert found == ["broadcast"]  # from one rank to one rank
            continue
        assert found in ([row], [])  # what does not fit is left out
        if record["how"] in (7, 15):  # a new input
            assert found == [row] or row in ("all-to-all", "scatter"), record


@pytest.mark.parametrize("total", ["allreduce", "reduce-scatter", "reduce"])
@pytest.mark.parametrize("world_size", [2, 5, 6])
def test_a_record_writes_its_reduction(total: str, world_size: int) -> None:
    for mesh, how in itertools.product(("pair", "full", "ordered"), (0, 1, 3, 7, 15)):
        record = {"kind": "reduce", "sum": total, "mesh": mesh, "where_low": 9, "how": how}
        (made,) = asked(drawn(world_size, record))
        assert row_of(made) == total


def test_what_is_refused_is_asked_for_where_the_program_may() -> None:
    for how, row in ((0, "allgather"), (1, "unequal-send-recv")):
        record = {"kind": "set", "row": "odd", "how": how}
        (made,) = asked(drawn(6, record, odd=True))
        assert row_of(made) == row
        assert "odd" in drawn(6, record, odd=True).labels
        assert "odd" not in drawn(6, record).labels


# -------------------------------------------------------------------------------------------------------------- shares


@pytest.fixture(scope="module")
def counts() -> Counter[str]:
    """Of a few hundred programs, how many have a label, a sort of mesh, or something else that is worth having."""
    found: Counter[str] = Counter()
    for plan, program in sample(500, seed=11):
        facts = {"programs", *program.labels}
        layouts = [spec.layout for spec in plan.inputs] + [step.layout for step in plan.steps]
        meshes = {layout.mesh for layout in layouts}
        readers = Counter(name for step in plan.steps for name in step.reads)
        tensors = plan.tensors()[1]
        facts |= {"single"} if any(mesh.size == 1 for mesh in meshes) else set()
        facts |= {"two-dims"} if any(mesh.ndim == 2 for mesh in meshes) else set()
        facts |= {"disordered"} if any(list(mesh.ranks) != sorted(mesh.ranks) for mesh in meshes) else set()
        facts |= {"all-ranks"} if any(mesh.size == plan.world_size for mesh in meshes) else set()
        facts |= {"part"} if any(1 < mesh.size < plan.world_size for mesh in meshes) else set()
        facts |= {"many-meshes"} if len(meshes) > 3 else set()
        facts |= {"idle"} if len({rank for mesh in meshes for rank in mesh.ranks}) < plan.world_size else set()
        facts |= {"read-twice"} if readers and max(readers.values()) > 1 else set()
        facts |= {"input-returned"} if {spec.name for spec in plan.inputs} & set(plan.outputs) else set()
        facts |= {"apart"} if len({tensors[name].layout.mesh for name in plan.outputs}) > 1 else set()
        facts |= {"streamed"} if any(step.stream_axis is not None for step in plan.steps) else set()
        facts |= {f"to-dim-{dim}" for step in plan.steps if step.reshards for dim in step.layout.sharding}
        facts |= {str(step.args[2]) for step in plan.steps if step.op == "multidevice::reduce"}
        facts |= {"strided-set"} if any(_strided(node) for graph in program.graphs for node in graph.nodes) else set()
        facts |= {f"{plan.world_size} ranks"}
        found.update(facts)
    return found


def _strided(node: torch.fx.Node) -> bool:
    """Whether a set or a reduction reads what is not contiguous."""
    if node.op != "call_function" or not qualified_name(node.target).startswith("multidevice::"):
        return False
    operand = node.args[0]
    return isinstance(operand, torch.fx.Node) and not _contiguous(operand.meta["val"])


def _contiguous(spec: object) -> bool:
    given = pytree.tree_leaves(spec)[0]
    return bool(torch.empty_strided(given.shape, given.stride, device="meta").is_contiguous())


@pytest.mark.parametrize(
    ("label", "share"),
    [
        ("allgather", 0.1), ("gather", 0.1), ("scatter", 0.08), ("broadcast", 0.1), ("send-recv", 0.06), ("all-to-all", 0.03),
        ("chunk", 0.02), ("local", 0.02), ("allreduce", 0.06), ("reduce-scatter", 0.06), ("reduce", 0.06), ("local-sum", 0.01),
        ("grid-allgather", 0.01), ("grid-chunk", 0.01), ("grid-allreduce", 0.005), ("unequal-send-recv", 0.01),
        ("pipelined", 0.1), ("scattered", 0.06), ("streams", 0.1), ("stages", 0.08), ("chain", 0.08), ("streamed", 0.2),
        ("single", 0.25), ("two-dims", 0.03), ("disordered", 0.3), ("all-ranks", 0.3), ("part", 0.3), ("many-meshes", 0.1),
        ("idle", 0.1), ("read-twice", 0.2), ("input-returned", 0.05), ("apart", 0.2), ("to-dim-0", 0.2), ("to-dim-1", 0.05),
        ("sum", 0.2), ("max", 0.02), ("min", 0.01), ("product", 0.01), ("avg", 0.005), ("strided", 0.05), ("strided-set", 0.02),
        ("in-place", 0.03), ("float32", 0.5), ("bfloat16", 0.05), ("float64", 0.03), ("int64", 0.05),
        *((f"{size} ranks", 0.05) for size in range(2, 7)),
    ],
)  # fmt: skip
def test_programs_contain_what_shows_defects(label: str, share: float, counts: Counter[str]) -> None:
    assert counts[label] >= share * counts["programs"], counts[label] / counts["programs"]


def test_about_one_program_in_twelve_asks_for_what_is_refused(counts: Counter[str]) -> None:
    assert 0.04 <= counts["odd"] / counts["programs"] <= 0.13


def test_programs_of_five_and_six_ranks_run() -> None:
    generator = random.Random(21)
    for number in range(60):
        program = plan_of(5 + number % 2, generator.randbytes(WIDTH)).build()
        run = Lockstep().run(program)
        assert run.finished, run.why
        for result in run.ranks:
            values = [value for value in pytree.tree_leaves(result.outputs) if value.numel()]
            assert all(float(value.abs().max()) < 1e3 for value in values)  # and finite


def test_values_lie_as_their_layouts_say() -> None:
    """Ranks that hold the same part hold the same values."""
    compared = 0
    products = drawn(4, {"kind": "set", "row": "all-to-all"}, {"kind": "reduce", "how": 1}, shape=(8, 12), mesh="full")
    assert "aten::matmul" in [step.op for step in products.steps]
    for plan in (products, *(plan for plan, _ in sample(200, seed=10))):
        run = Lockstep().run(plan.build(), observe=True)
        assert run.finished, run.why
        for name, tensor in plan.tensors()[1].items():
            layout, seen = tensor.layout, {}
            for rank, node in tensor.nodes.items():
                values = run.ranks[rank].values
                assert values is not None
                first = seen.setdefault(str(layout.place(rank, tensor.shape)), values[node.name])
                assert torch.equal(first, values[node.name]), f"{name} on rank {rank}"
                compared += first is not values[node.name]
    assert compared > 500


def test_programs_have_up_to_a_few_steps_for_each_record() -> None:
    lengths = [len(plan.steps) for plan, _ in sample(200, seed=4)]
    assert max(lengths) <= 3 * RECORDS
    assert 3 <= sum(lengths) / len(lengths) <= 8
