"""Scaled-down programs: small sizes for large ones, under which a program means the same, and is refuted or passes as it was."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, seed, settings

from tcverify import verify
from tcverify.application import InProcess, Pair
from tcverify.application.loading import prepare_pass
from tcverify.campaign.hypothesis_settings import SETTINGS
from tcverify.errors import ProgramError
from tcverify.execution import Lockstep
from tcverify.passes import SequenceParallel
from tcverify.program import VARYING, Contract, GraphBuilder, InputSpec, Mesh, Program, Recipe, shard, spmd_program
from tcverify.program.codec import decode, dumps, encode, loads
from tcverify.scaled_down import pairs, scale_down, small_pair
from tcverify.scaled_down.sizes import Sizes
from tcverify.shrink.graph import sketch
from tcverify.strategies import programs_of
from tests.mutants.sequence_parallel import FirstChunkForAll

MESH = Mesh.grid({"tp": 4})
WIDE = torch.float32


def made(build: Callable[[GraphBuilder], Any], *inputs: InputSpec) -> Program:
    return spmd_program(MESH, list(inputs), build)


def shapes(program: Program) -> dict[str, tuple[int, ...]]:
    return {n.name: n.meta["val"].shape for n in program.graphs[0].nodes if hasattr(n.meta.get("val"), "shape")}


def test_views_merge_and_split_what_they_did() -> None:
    def build(b: GraphBuilder) -> Any:
        x, w = b.input("x"), b.input("w")
        flat = b.call("aten::view", x, [3 * 2048, 4096])
        product = b.call("aten::mm", flat, w)
        heads = b.call("aten::view", product, [3, 2048, 32, 128])
        return b.call("aten::cat", [heads, heads], 1)

    program = made(build, InputSpec("x", (3, 2048, 4096), WIDE), InputSpec("w", (4096, 4096), WIDE))
    (scaled,) = scale_down([program]).programs
    small = shapes(scaled)
    batch, length, heads, width = small["view_1"]
    assert batch == 3
    assert max(length, heads * width) < 200
    assert min(length, heads, width) >= 2
    assert small["view"] == (batch * length, small["w"][0])
    assert small["cat"] == (batch, 2 * length, heads, width)
    assert Lockstep().run(scaled).finished


def test_buckets_are_filled_and_emptied_alike() -> None:
    """Sums of sizes of several kinds, and slices by position."""

    def build(b: GraphBuilder) -> Any:
        x, y = b.input("x"), b.input("y")
        parts = [b.call("aten::view", x, [1000 * 96]), b.call("aten::view", y, [640 * 7])]
        bucket = b.call("aten::cat", parts)
        back = b.call("aten::slice.Tensor", bucket, 0, 1000 * 96, 1000 * 96 + 640 * 7)
        return b.call("aten::view", back, [640, 7]), b.call("aten::slice.Tensor", bucket, 0, 1, 9223372036854775807)

    program = made(build, InputSpec("x", (1000, 96), WIDE), InputSpec("y", (640, 7), WIDE))
    (scaled,) = scale_down([program]).programs
    small = shapes(scaled)
    assert small["slice_1"][0] == small["y"][0] * 7
    assert small["cat"][0] == small["x"][0] * small["x"][1] + small["y"][0] * 7
    assert small["slice_2"][0] == small["cat"][0] - 1
    assert small["cat"][0] < 2000


def test_sizes_that_are_equal_by_chance_are_told_apart() -> None:
    """A square weight: its rows are divided into few heads, its columns are as wide as the model."""

    def build(b: GraphBuilder) -> Any:
        x, up, down = b.input("x"), b.input("up"), b.input("down")
        product = b.call("aten::mm", x, b.call("aten::t", up))
        heads = b.call("aten::view", product, [64, 512, 4])
        flat = b.call("aten::view", heads, [64, 2048])
        return b.call("aten::add.Tensor", b.call("aten::mm", flat, down), x)

    inputs = [
        InputSpec("x", (64, 2048), WIDE),
        InputSpec("up", (2048, 2048), WIDE),
        InputSpec("down", (2048, 2048), WIDE),
    ]
    (scaled,) = scale_down([made(build, *inputs)]).programs
    small = shapes(scaled)
    rows, columns = small["up"]
    assert small["down"] == (rows, columns)
    assert rows == 4 * small["view"][1] != columns
    assert Lockstep().run(scaled).finished


def test_parts_of_a_bucket_that_are_equal_by_chance_are_told_apart() -> None:
    def build(b: GraphBuilder) -> Any:
        x, y = b.input("x"), b.input("y")
        bucket = b.call("aten::cat", [b.call("aten::view", x, [64 * 96]), b.call("aten::view", y, [2048 * 3])])
        split = b.call("aten::split_with_sizes", bucket, [6144, 6144])
        parts = [b.call("python::getitem", split, i) for i in range(2)]
        return b.call("aten::view", parts[0], [64, 96]), b.call("aten::view", parts[1], [2048, 3])

    (scaled,) = scale_down([made(build, InputSpec("x", (64, 96), WIDE), InputSpec("y", (2048, 3), WIDE))]).programs
    small = shapes(scaled)
    assert small["x"] == small["view_2"]
    assert small["y"] == small["view_3"]
    assert small["view"] != small["view_1"]
    assert Lockstep().run(scaled).finished


def test_what_fake_kernels_forgive_is_asked_of_real_ones() -> None:
    """On fake tensors index_add does not look whether rows are as wide as those that they are added to."""

    def build(b: GraphBuilder) -> Any:
        x, rows, order = b.input("x"), b.input("rows"), b.input("order")
        return b.call("aten::index_add", b.call("aten::clone", x), 0, order, rows)

    order = InputSpec("order", (4096,), torch.int64, recipe=Recipe("integers", 2048.0))
    (scaled,) = scale_down([made(build, InputSpec("x", (2048, 2048)), InputSpec("rows", (4096, 2048)), order)]).programs
    assert shapes(scaled)["rows"][1] == shapes(scaled)["x"][1] < 2048
    assert Lockstep().run(scaled).finished


def test_members_are_counted_wherever_values_that_collectives_give_or_take_are_computed_with() -> None:
    """Behind a product of what has been gathered; and before one that is scattered."""

    def behind(b: GraphBuilder) -> Any:
        x, w = b.input("x"), b.input("w")
        whole = b.call("_c10d_functional::all_gather_into_tensor", x, 32, "tp")
        product = b.call("aten::mm", b.call("_c10d_functional::wait_tensor", whole), w)
        return b.call("aten::view", product, [32, 64 * 512])

    def before(b: GraphBuilder) -> Any:
        x, w = b.input("x"), b.input("w")
        scaled = b.call("aten::neg", b.call("aten::view", x, [32, 2 * 256]))
        product = b.call("aten::mm", b.call("aten::view", scaled, [64, 256]), w)
        return b.call("_c10d_functional::reduce_scatter_tensor", product, "sum", 32, "tp")

    inputs = [InputSpec("x", (64, 256), WIDE, (("tp", VARYING),)), InputSpec("w", (256, 512), WIDE)]
    for build in (behind, before):
        (scaled,) = scale_down([spmd_program(Mesh.grid({"tp": 32}), inputs, build)]).programs
        assert shapes(scaled)["view"][0] == 32
        assert shapes(scaled)["w"][1] < 512


def test_a_row_that_is_no_rank_s_leaves_other_sizes_free() -> None:
    """One row in, one size of the weight out: only what counts the members stays as it is."""

    def build(b: GraphBuilder) -> Any:
        x, w = b.input("x"), b.input("w")
        product = b.call("aten::mm", x, w)
        return product, b.call("tensor_cast::matmul_all_reduce", x, w, None, b.rank, b.group("tp"))

    inputs = [InputSpec("x", (1, 4096), WIDE, (("tp", VARYING),)), InputSpec("w", (4096, 512), WIDE)]
    (scaled,) = scale_down([made(build, *inputs)]).programs
    assert max(shapes(scaled)["w"]) < 64
    assert Lockstep().run(scaled).finished


def test_what_fake_kernels_forgive_is_learnt_before_sizes_are_chosen() -> None:
    """Rows and columns of one number stay apart, though on fake tensors it does not matter how wide either side is."""

    def build(b: GraphBuilder) -> Any:
        x, rows, order = b.input("x"), b.input("rows"), b.input("order")
        total = b.call("aten::index_add", b.call("aten::clone", x), 0, order, rows)
        return b.call("aten::view", total, [2048, 512, 4])

    order = InputSpec("order", (4096,), torch.int64, recipe=Recipe("integers", 2048.0))
    (scaled,) = scale_down([made(build, InputSpec("x", (2048, 2048)), InputSpec("rows", (4096, 2048)), order)]).programs
    assert shapes(scaled)["x"] == (2, 8)
    assert shapes(scaled)["rows"][1] == 8
    assert Lockstep().run(scaled).finished


def test_shapes_that_a_call_is_given_hold_several_sizes_of_one_number() -> None:
    """Rows that are filled, and a dim that is repeated, need not be as many as columns."""

    def build(b: GraphBuilder) -> Any:
        x, mean = b.input("x"), b.input("mean")
        rows = b.call("aten::full", [2048, 2048], 0.0)
        repeated = b.call("aten::expand", mean, [2048, 2048])
        product = b.call("aten::mm", b.call("aten::add.Tensor", rows, repeated), x)
        return product, b.call("aten::view", x, [512, 4, 4])

    (scaled,) = scale_down([made(build, InputSpec("x", (2048, 4), WIDE), InputSpec("mean", (2048, 1), WIDE))]).programs
    small = shapes(scaled)
    assert small["mean"][0] == small["full"][0] == small["expand"][0] == 2
    assert small["x"][0] == small["full"][1] == small["expand"][1] == 8
    assert Lockstep().run(scaled).finished


def test_rows_as_many_as_ranks_become_fewer_unless_each_is_of_a_rank() -> None:
    """A shard of 32 rows, flattened for a bucket, and what 32 ranks gave, by rank."""

    def build(b: GraphBuilder) -> Any:
        rows, x = b.input("rows"), b.input("x")
        flat, part = b.call("aten::view", rows, [32 * 4096]), b.call("aten::view", x, [64 * 4096])
        whole = b.call("_c10d_functional::all_gather_into_tensor", part, 32, "tp")
        whole = b.call("_c10d_functional::wait_tensor", whole)
        return flat, b.call("aten::view", whole, [32, 64, 4096])

    inputs = [InputSpec("rows", (32, 4096), WIDE), InputSpec("x", (64, 4096), WIDE)]
    (scaled,) = scale_down([spmd_program(Mesh.grid({"tp": 32}), inputs, build)]).programs
    small = shapes(scaled)
    assert small["rows"][0] < 32
    assert small["view_2"][0] == 32
    assert small["view_2"][1:] == small["x"]
    assert Lockstep().run(scaled).finished


def test_shards_and_indices_stay_what_they_are() -> None:
    def build(b: GraphBuilder) -> Any:
        table, ids = b.input("table"), b.input("ids")
        first, last = b.constant("first", lambda rank: rank * 1024), b.constant("last", lambda rank: rank * 1024 + 1024)
        own = b.call("aten::slice.Tensor", b.call("aten::embedding", table, ids), 0, first, last)
        return own, b.call("aten::ge.Scalar", ids, 32000)

    inputs = (
        InputSpec("table", (32000, 512), WIDE),
        InputSpec("ids", (4096,), torch.int64, (), Recipe("integers", 32000.0)),
    )
    program = made(build, *inputs)
    (scaled,) = scale_down([program]).programs
    run = Lockstep().run(scaled)
    assert run.finished, run.why
    table, ids = scaled.inputs
    whole = Lockstep().run(made(lambda b: b.call("aten::embedding", b.input("table"), b.input("ids")), *scaled.inputs))
    assert torch.equal(torch.cat([result.outputs[0] for result in run.ranks]), whole.ranks[0].outputs[0])
    assert ids.shape[0] < 100
    assert ids.recipe.scale == table.shape[0]
    compared = next(n for n in scaled.graphs[0].nodes if n.name == "ge")
    assert compared.args[1] == table.shape[0]


def test_what_is_sharded_can_be_sharded() -> None:
    program = made(lambda b: b.call("aten::neg", b.input("x")), InputSpec("x", (4096, 512), WIDE, (("tp", shard(0)),)))
    (scaled,) = scale_down([program]).programs
    (spec,) = scaled.inputs
    assert spec.shape[0] % 4 == 0
    assert spec.shape[0] // 4 >= 2


def test_small_numbers_become_smaller_where_there_is_no_memory_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 128 of which a rank has shards of 8 rows stay large as long as the shards do."""
    mesh = Mesh.grid({"dp": 16})

    def build(b: GraphBuilder) -> Any:
        rows = b.call("_c10d_functional::all_gather_into_tensor", b.input("w"), 16, b.group("dp"))
        whole = b.call("_c10d_functional::wait_tensor", rows)
        return b.call("aten::view", whole, [1, 128, 4096])

    weight = InputSpec("w", (8, 4096), WIDE, (("dp", VARYING),))
    program = spmd_program(mesh, [weight], build)
    pair = Pair(program, program)
    monkeypatch.setattr("tcverify.program.program.FEW_ELEMENTS", 0)
    assert shapes(small_pair(pair).original)["w"][0] == 8
    monkeypatch.setattr(pairs, "_EASY", 100)
    small = small_pair(pair).original
    assert shapes(small)["w"][0] == 2
    assert shapes(small)["view"][:2] == (1, 32)
    monkeypatch.setattr(pairs, "MOST", 100)
    with pytest.raises(ProgramError, match=r"values take .* GiB, of .* that they may take"):
        small_pair(pair)


@pytest.mark.parametrize("ranks", [8, 16])
@pytest.mark.parametrize("tight", [False, True], ids=["easy", "tight"])
def test_positions_of_ranks_are_no_sizes(ranks: int, tight: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank picks of the gathered whole is its own part: on every rank, also where small numbers shrink."""
    monkeypatch.setattr(pairs, "_EASY", -1 if tight else 1 << 27)

    def build(b: GraphBuilder) -> Any:
        own = b.constant("own", lambda rank: rank)
        rows = b.call("_c10d_functional::all_gather_into_tensor", b.input("x"), ranks, "dp")
        whole = b.call("aten::view", b.call("_c10d_functional::wait_tensor", rows), [ranks, 3, 4096])
        return b.call("aten::neg", b.call("aten::select.int", whole, 0, own))

    def own_part(module: Any) -> None:
        (x,) = (n for n in module.graph.nodes if n.op == "placeholder")
        next(n for n in module.graph.nodes if n.target is torch.ops.aten.neg.default).args = (x,)
        module.graph.eliminate_dead_code()

    def next_part(module: Any) -> None:
        picked = next(n for n in module.graph.nodes if n.target is torch.ops.aten.select.int)
        picked.args = (*picked.args[:2], (picked.args[2] + 1) % ranks)

    x = InputSpec("x", (3, 4096), WIDE, (("dp", VARYING),))
    program = replace(spmd_program(Mesh.grid({"dp": ranks}), [x], build), sizes="small")
    promises = Contract(metadata=False)
    verdict = verify(own_part, program, contract=promises)
    assert verdict.status == "passed", verdict.doubts
    assert verify(next_part, program, contract=promises).status == "refuted"


def test_a_large_program_that_ran_on_its_own_sizes_does_so_again() -> None:
    """From its file, and while it is reduced; of small programs files say nothing."""

    def build(b: GraphBuilder) -> Any:
        return b.call("aten::neg", b.input("x"))

    large = made(build, InputSpec("x", (1 << 13, 1 << 11), WIDE))
    real = replace(large, sizes="real")
    assert (large.large, real.large) == (True, False)
    for again in (loads(dumps(real)), sketch.program_of(sketch.sketch_of(real))):
        assert (again.sizes, again.large) == ("real", False)
    assert loads(dumps(large)).large
    (scaled,) = scale_down([large]).programs
    assert "sizes" not in encode(scaled)
    with pytest.raises(ProgramError, match="there are no sizes 'tiny'"):
        decode({**encode(scaled), "sizes": "tiny"})


def test_nothing_that_is_small_changes() -> None:
    program = made(lambda b: b.call("aten::neg", b.input("x")), InputSpec("x", (3, 8, 1), WIDE))
    assert scale_down([program]).programs[0].inputs == program.inputs


def test_what_is_left_of_a_sum_whose_other_sizes_are_kept_is_kept() -> None:
    sizes = Sizes()
    rows, end, start, length = (sizes.new(n) for n in (32, 24, 16, 8))
    sizes.pin([rows])
    sizes.sum_up(end, [start, length])
    sizes.sum_up(rows, [end, length])
    assert sizes.solve() == [32, 24, 16, 8]


def test_sums_that_overlap_stay_sums() -> None:
    rng, smaller = random.Random(5), 0
    for _ in range(300):
        sizes = Sizes()
        made = [sizes.new(rng.choice((8, 12, 16, 24, 32, 48, 64))) for _ in range(4)]
        sums = []
        for _ in range(4):
            parts = rng.sample(made, 2)
            made.append(sizes.new(sum(sizes.number[part] for part in parts)))
            sizes.sum_up(made[-1], parts)
            sums.append((made[-1], parts))
        sizes.tie(*rng.sample(made, 2))
        found = sizes.solve()
        assert all(found[whole] == sum(found[part] for part in parts) for whole, parts in sums)
        smaller += found != sizes.number
    assert smaller > 100


@pytest.mark.parametrize("strategy", ["structured", "moe", "overlap", "bucketing"])
def test_a_program_and_its_twin_have_one_verdict(strategy: str) -> None:
    seen: Counter[str] = Counter()
    sound, broken = (InProcess(prepare_pass(p, "", {})) for p in (SequenceParallel, FirstChunkForAll))

    @seed(3)
    @settings(SETTINGS, max_examples=12)
    @given(programs_of(strategy, mesh=MESH))
    def compare(program: Program) -> None:
        for subject in (sound, broken):
            pair = subject.start(program)()
            if pair.rewritten is None or pair.defects or pair.declined or pair.foreign:
                continue
            small = small_pair(pair)
            assert small.rewritten is not None
            lockstep = Lockstep()
            large, less = (
                lockstep.compare(pair.original, pair.rewritten),
                lockstep.compare(small.original, small.rewritten),
            )
            assert less.rewritten.finished == large.rewritten.finished
            wrong = [any(d.problem or d.difference > 1e-6 * max(1.0, d.scale) for d in c.deltas) for c in (large, less)]
            assert wrong[0] == wrong[1]
            seen[f"{wrong[0]}, {'smaller' if small.scaled.sizes else 'as it was'}"] += 1

    compare()
    assert seen["False, smaller"]


def test_the_pass_is_given_the_real_sizes_and_its_decisions_are_verified() -> None:
    """It rewrites what has a million elements; the scaled-down program has none."""

    def thresholded(module: Any) -> None:
        for node in list(module.graph.nodes):
            if node.op == "call_function" and node.meta["val"].numel() >= 1 << 20:
                node.target = torch.ops.aten.abs.default

    inputs = [InputSpec(name, (8192, 8192), WIDE) for name in ("x", "y", "z")]
    program = made(lambda b: b.call("aten::neg", b.input("x")), *inputs)
    verdict = verify(thresholded, program)
    assert verdict.status == "refuted"
    assert verdict.pair.original.inputs[0].shape[0] < 100


def large(*shapes: tuple[int, ...]) -> Program:
    """A program that negates the first of its inputs, and is too large to run."""
    names = "xyz"[: len(shapes)]

    def build(b: GraphBuilder) -> Any:
        first, *_ = [b.input(name) for name in names]
        return b.call("aten::neg", first)

    specs = [InputSpec(name, shape, WIDE) for name, shape in zip(names, shapes, strict=True)]
    return made(build, *specs)


def test_what_does_not_fit_at_real_sizes_is_refuted_though_it_would_at_small_ones() -> None:
    """A bias of 8,000 elements added to rows of 8,192: both sizes may become 2."""

    def biased(module: Any) -> None:
        neg = next(node for node in module.graph.nodes if node.op == "call_function")
        with module.graph.inserting_after(neg):
            odd = module.graph.call_function(torch.ops.aten.zeros.default, ([8000],), {"dtype": torch.float32})
        with module.graph.inserting_after(odd):
            added = module.graph.call_function(torch.ops.aten.add.Tensor, (neg, odd))
        odd.meta["val"], added.meta["val"] = neg.meta["val"][0, :8000], neg.meta["val"]
        neg.replace_all_uses_with(added, delete_user_cb=lambda user: user is not added)

    verdict = verify(biased, large((8192, 8192)))
    assert verdict.status == "refuted"
    (raised, *_) = [f for f in verdict.findings if f.kind == "rewritten-raises"]
    assert raised.node == "add_tensor"


def test_a_rewrite_that_cannot_leave_its_process_is_not_run_at_its_real_sizes() -> None:
    def foreign(module: Any) -> None:
        neg = next(node for node in module.graph.nodes if node.op == "call_function")
        neg.target = lambda x: -x

    verdict = verify(foreign, large((8192, 8192)))
    assert (verdict.status, verdict.doubts[0].reason) == ("inconclusive", "unsupported-op")


def test_wrong_metadata_stays_wrong() -> None:
    def stale(module: Any) -> None:
        neg = next(node for node in module.graph.nodes if node.op == "call_function")
        neg.target = torch.ops.aten.t.default

    program = large((1 << 14, 1 << 13))
    kinds = {finding.kind for finding in verify(stale, program).hygiene}
    assert "stale-metadata" in kinds


def test_collectives_that_do_not_agree_do_not_come_to_agree() -> None:
    """One rank contributes 8,000 rows, the others 8,192: both might become 2."""
    program = large((8192, 512), (8000, 512))
    graphs = []
    for rank in range(4):
        graph = program.graph(rank)
        neg, output = [node for node in graph.nodes if node.op in ("call_function", "output")]
        given = next(node for node in graph.nodes if node.name == ("y" if rank == 1 else "x"))
        with graph.inserting_before(output):
            call = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (given, "sum", "tp"))
        call.meta["val"] = given.meta["val"]
        output.replace_input_with(neg, call)
        graph.erase_node(neg)
        graphs.append(graph)
    (scaled,) = scale_down([program.with_graphs(graphs)]).programs
    assert len(scaled.graphs) == 2
    assert Lockstep().run(scaled).mismatch is not None
