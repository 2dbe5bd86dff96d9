"""P4 and P5: experts on local tokens, and attention that is sliced before its projection; and what must be left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tcverify.passes import SequenceParallel
from tcverify.program import PARTIAL, VARYING, InputSpec, Mesh, MeshDim, Program, Recipe, shard, spmd_program
from tests.mutants.sequence_experts import EXPECTED, MUTANTS
from tests.support.sequence_programs import ALL_MESHES, GRID, STRIDED, TP2, Builder, apply, findings, ops

Build = Callable[["Experts"], Any]

LAYOUTS = [(12, 4), (1, 12, 4), (3, 12, 4)]
COUNT = 3
WIDE = 6


class Experts(Builder):
    """Short names for what blocks of experts are made of. Tokens are flat or [B, S, H]."""

    def normed(self) -> Any:
        """A norm that P1 leaves local."""
        return self.rms_norm(self.all_reduce(self["x"]))

    def times(self, value: Any, weight: str) -> Any:
        return self.call("aten::matmul", value, self[weight])

    def chosen(self, logits: Any, k: int = 2) -> tuple[Any, Any]:
        """Shares and choices."""
        both = self.call("moe_gating_top_k_softmax", logits, k)
        return self.graph.getitem(both, 0), self.graph.getitem(both, 1)

    def multiplied(self, rows: Any, choices: Any, up: str = "up", down: str = "down") -> Any:
        inner = self.call("silu", self.call("routed_matmul", rows, self[up], None, choices))
        return self.call("routed_matmul", inner, self[down], None, choices)

    def weighed(self, rows: Any, shares: Any, choices: Any) -> Any:
        back = self.call("unpermute_tokens", rows, choices)
        product = self.call("aten::mul.Tensor", back, self.call("aten::unsqueeze", shares, -1))
        return self.call("aten::sum.dim_IntList", product, [-2])

    def experts(self, tokens: Any, k: int = 2, gate: str = "gate", up: str = "up", down: str = "down") -> Any:
        shares, choices = self.chosen(self.times(tokens, gate), k)
        rows = self.call("init_routing_v2", tokens, choices)
        return self.weighed(self.multiplied(rows, choices, up, down), shares, choices)

    def shared(self, tokens: Any, first: str = "first", second: str = "second") -> Any:
        return self.times(self.call("silu", self.times(tokens, first)), second)

    def attention(self, tokens: Any, query: str = "wq") -> Any:
        """Attention of one head of size 4, computed by every rank."""
        q, k = self.times(tokens, query), self.times(tokens, "wk")
        heads = self.view(k, *k.meta["val"].shape[:-1], 1, 4)
        return self.call("attention", q, heads, heads, None, None, None, None, None)

    def carried(self) -> tuple[Any, Any]:
        """A norm on all tokens and a residual that P2 leaves local."""
        return self.fused(self.all_reduce(self["x"]), self["r"])


def program(
    build: Build, shape: tuple[int, ...] = (12, 4), mesh: Mesh = TP2, dtype: torch.dtype = torch.float32
) -> Program:
    """Weights are the same on all ranks but for those whose name ends with `_v`, which vary, and `_s`, which are divided."""
    hidden, members = shape[-1], len(mesh.dim("tp").group(mesh.world_size - 1))
    norm, small = Recipe("norm_weight"), Recipe(scale=0.5)
    varying, tp = (("tp", VARYING),), "tp"
    divided = WIDE * members
    specs = [
        InputSpec("x", shape, dtype, ((tp, PARTIAL),)),
        InputSpec("y", shape, dtype, ((tp, PARTIAL),)),
        InputSpec("r", shape, dtype),
        InputSpec("v", shape, dtype, varying),
        InputSpec("w", (hidden,), dtype, recipe=norm),
        InputSpec("gate", (hidden, COUNT), dtype, recipe=Recipe(scale=2.0)),
        InputSpec("gate_v", (hidden, COUNT), dtype, varying, Recipe(scale=2.0)),
        InputSpec("gate_bias", (COUNT,), dtype),
        InputSpec("token_bias", (*shape[:-1], COUNT), dtype),
        InputSpec("up", (COUNT, hidden, WIDE), dtype, recipe=small),
        InputSpec("up_v", (COUNT, hidden, WIDE), dtype, varying, small),
        InputSpec("down", (COUNT, WIDE, hidden), dtype, recipe=small),
        InputSpec("first", (hidden, WIDE), dtype, recipe=small),
        InputSpec("second", (WIDE, hidden), dtype, recipe=small),
        InputSpec("sigmoid", (hidden, 1), dtype, recipe=small),
        InputSpec("wq", (hidden, 4), dtype, recipe=small),
        InputSpec("wq_v", (hidden, 4), dtype, varying, small),
        InputSpec("wk", (hidden, 4), dtype, recipe=small),
        InputSpec("wo", (4, hidden), dtype, recipe=small),
        InputSpec("wo_v", (4, hidden), dtype, varying, small),
        InputSpec("bias", (hidden,), dtype),
    ]
    if all(len(mesh.dim("tp").group(rank)) == members for rank in range(mesh.world_size)):
        specs += [
            InputSpec("up_s", (COUNT, hidden, divided), dtype, ((tp, shard(2)),), small),
            InputSpec("down_s", (COUNT, divided, hidden), dtype, ((tp, shard(1)),), small),
            InputSpec("first_s", (hidden, divided), dtype, ((tp, shard(1)),), small),
            InputSpec("second_s", (divided, hidden), dtype, ((tp, shard(0)),), small),
        ]
    names = [spec.name for spec in specs]
    return spmd_program(mesh, specs, lambda graph: build(Experts(graph, names)))


def check(
    build: Build,
    fires: dict[str, int],
    shape: tuple[int, ...] = (12, 4),
    mesh: Mesh = TP2,
    patterns: str = "P1,P2,P3,P4,P5",
) -> Program:
    """Assert that it fires so often on every rank with a group, keeps the meaning, and does nothing a second time."""
    original = program(build, shape, mesh)
    expected = dict.fromkeys(SequenceParallel.PATTERNS, 0) | fires
    for rank in range(mesh.world_size):
        pass_ = SequenceParallel(patterns=patterns)
        pass_(original.graph_module(rank))
        alone = len(mesh.dim("tp").group(rank)) == 1
        assert pass_.rewrites == (dict.fromkeys(expected, 0) if alone else expected)
    rewritten, _ = apply(original, SequenceParallel(patterns=patterns))
    assert findings(original, SequenceParallel(patterns=patterns)) == set()
    assert apply(rewritten, SequenceParallel(patterns=patterns))[1] == 0
    return rewritten


# ---------------------------------------------------------------------------------------------------------- P4: it moves


def test_every_expert_for_every_token() -> None:
    check(lambda b: b.experts(b.normed(), COUNT), {"P1": 1, "P4": 1}, mesh=GRID)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("shape", LAYOUTS, ids=str)
@pytest.mark.parametrize("mesh", ALL_MESHES.values(), ids=ALL_MESHES)
def test_experts_behind_a_norm_stay_local(mesh: Mesh, shape: tuple[int, ...], k: int) -> None:
    rewritten = check(lambda b: b.experts(b.normed(), k), {"P1": 1, "P4": 1}, shape, mesh)
    rank = mesh.world_size - 1  # it has a group on every mesh
    assert ops(rewritten, rank).count("all_gather") == 1
    assert ops(rewritten, rank)[-1] == "all_gather"  # of the sum over the experts alone
    assert "all_reduce" not in ops(rewritten, rank)


def test_the_experts_have_the_tokens_of_the_rank() -> None:
    rewritten = check(lambda b: b.experts(b.normed()), {"P1": 1, "P4": 1})
    by_op = {
        str(n.target).split(".")[1]: n
        for n in rewritten.graph(0).nodes
        if n.op == "call_function" and "." in str(n.target)
    }
    assert tuple(by_op["init_routing_v2"].meta["val"].shape) == (6 * 2, 4)
    assert tuple(by_op["unpermute_tokens"].meta["val"].shape) == (6, 2, 4)


def test_a_residual_and_the_next_norm_stay_local_behind_experts() -> None:
    def build(b: Experts) -> Any:
        hidden, residual = b.carried()
        return b.rms_norm(b.add(residual, b.experts(hidden)))

    rewritten = check(build, {"P2": 1, "P3": 1, "P4": 1})
    assert ops(rewritten).count("all_gather") == 1


def test_layers_of_experts_stay_local_throughout() -> None:
    def build(b: Experts) -> Any:
        hidden, residual = b.carried()
        for _ in range(3):
            hidden, residual = b.fused(b.experts(hidden), residual)
        return hidden, residual

    rewritten = check(build, {"P2": 4, "P4": 3})
    assert ops(rewritten).count("all_gather") == 2
    assert ops(rewritten).count("reduce_scatter") == 1


@pytest.mark.parametrize("gated", [False, True])
def test_a_shared_expert_stays_local_beside_them(gated: bool) -> None:
    def build(b: Experts) -> Any:
        tokens = b.normed()
        shared = b.shared(tokens)
        if gated:
            shared = b.call("aten::mul.Tensor", shared, b.call("aten::sigmoid", b.times(tokens, "sigmoid")))
        return b.add(b.experts(tokens), shared)

    rewritten = check(build, {"P1": 1, "P4": 1})
    assert ops(rewritten).count("all_gather") == 1


def test_the_sum_of_a_divided_shared_expert_is_scattered() -> None:
    def build(b: Experts) -> Any:
        tokens = b.normed()
        return b.add(b.experts(tokens), b.all_reduce(b.shared(tokens, "first_s", "second_s")))

    rewritten = check(build, {"P1": 1, "P4": 1})
    assert ops(rewritten).count("reduce_scatter") == 2
    assert ops(rewritten).count("all_gather") == 2  # of the tokens, for the shared expert, and of the sum


def test_renormalised_shares_and_a_biased_gate_stay_local() -> None:
    def build(b: Experts) -> Any:
        tokens = b.normed()
        shares, choices = b.chosen(b.add(b.times(tokens, "gate"), b["gate_bias"]))
        shares = b.call("aten::div.Tensor", shares, b.call("aten::sum.dim_IntList", shares, [-1], True))
        rows = b.multiplied(b.call("init_routing_v2", tokens, choices), choices)
        return b.weighed(rows, shares, choices)

    check(build, {"P1": 1, "P4": 1})


def test_a_gate_in_float32_stays_local() -> None:
    def build(b: Experts) -> Any:
        tokens = b.normed()
        logits = b.call("aten::_to_copy", b.times(tokens, "gate"), dtype=torch.float64)
        shares, choices = b.chosen(logits)
        shares = b.call("aten::_to_copy", shares, dtype=torch.float32)
        return b.weighed(b.multiplied(b.call("init_routing_v2", tokens, choices), choices), shares, choices)

    check(build, {"P1": 1, "P4": 1})


def test_choices_that_someone_reads_in_full_are_gathered_for_them() -> None:
    def build(b: Experts) -> Any:
        tokens = b.normed()
        shares, choices = b.chosen(b.times(tokens, "gate"))
        rows = b.multiplied(b.call("init_routing_v2", tokens, choices), choices)
        return b.weighed(rows, shares, choices), choices, shares, tokens

    rewritten = check(build, {"P1": 1, "P4": 1})
    assert ops(rewritten).count("all_gather") == 4


@pytest.mark.parametrize("mesh", [STRIDED, Mesh(3, (MeshDim("tp", ((2, 0, 1),)),))], ids=["strided", "turned"])
def test_groups_in_any_order(mesh: Mesh) -> None:
    check(lambda b: b.experts(b.normed()), {"P1": 1, "P4": 1}, (12, 4), mesh)


def test_a_pattern_that_is_not_asked_for_does_not_run() -> None:
    check(lambda b: b.experts(b.normed()), {"P1": 1}, patterns="P1,P2,P3,P5")
    check(lambda b: b.experts(b.normed()), {}, patterns="P4")  # no norm is local


# ------------------------------------------------------------------------------------------------------ P4: it stays


def left_alone(
    build: Build, fires: dict[str, int] | None = None, shape: tuple[int, ...] = (12, 4), mesh: Mesh = TP2
) -> None:
    """Experts stay on all tokens, and everything that can move does all the same."""
    rewritten = check(build, {"P1": 1} if fires is None else fires, shape, mesh)
    routed = [n for n in rewritten.graph(0).nodes if "init_routing_v2" in str(n.target)]
    tokens = 1
    for size in shape[:-1]:
        tokens *= size
    assert routed
    assert all(n.meta["val"].shape[0] % tokens == 0 for n in routed)


def test_a_gate_that_differs_between_ranks() -> None:
    left_alone(lambda b: b.experts(b.normed(), gate="gate_v"))


def test_experts_that_differ_between_ranks() -> None:
    left_alone(lambda b: b.experts(b.normed(), up="up_v"))


def test_experts_that_are_divided_over_the_ranks() -> None:
    left_alone(lambda b: b.rms_norm(b.all_reduce(b.experts(b.normed(), up="up_s", down="down_s"))), {"P1": 2})


def test_rows_that_are_sent_to_other_ranks() -> None:
    def build(b: Experts) -> Any:
        tokens = b.normed()
        shares, choices = b.chosen(b.times(tokens, "gate"))
        rows = b.call("init_routing_v2", tokens, choices)
        there = b.call("all_to_all", rows, [12, 12], [12, 12], b.graph.rank, b.graph.group("tp"))
        made = b.call("aten::mm", b.call("aten::mm", there, b["wq_v"]), b["wo_v"])
        back = b.call("all_to_all", made, [12, 12], [12, 12], b.graph.rank, b.graph.group("tp"))
        return b.weighed(back, shares, choices)

    left_alone(build)


@pytest.mark.parametrize("k", [2, COUNT])
def test_chunks_whose_sizes_stand_in_the_graph(k: int) -> None:
    def build(b: Experts) -> Any:
        tokens = b.normed()
        shares, choices = b.chosen(b.times(tokens, "gate"), k)
        rows = b.call("init_routing_v2", tokens, choices)
        split = b.call("aten::split_with_sizes", rows, [4 * k] * 3)
        parts = [b.graph.getitem(split, i) for i in range(3)]
        made = b.call("grouped_matmul", parts, [b["wq"]] * 3, [None] * 3)
        return b.weighed(made, shares, choices)

    left_alone(build)


def test_a_capacity_that_depends_on_the_number_of_tokens() -> None:
    def build(b: Experts) -> Any:
        tokens = b.normed()
        shares, choices = b.chosen(b.times(tokens, "gate"))
        rows = b.multiplied(b.call("init_routing_v2", tokens, choices), choices)
        kept = b.call("aten::slice.Tensor", rows, 0, 0, 18)
        return b.weighed(b.call("aten::constant_pad_nd", kept, [0, 0, 0, 6], 0.0), shares, choices)

    left_alone(build)


def test_rows_that_someone_reads() -> None:
    def build(b: Experts) -> Any:
        tokens = b.normed()
        shares, choices = b.chosen(b.times(tokens, "gate"))
        rows = b.multiplied(b.call("init_routing_v2", tokens, choices), choices)
        return b.weighed(rows, shares, choices), rows

    left_alone(build)


def test_rows_that_are_viewed_or_transposed() -> None:
    def build(b: Experts) -> Any:
        tokens = b.normed()
        shares, choices = b.chosen(b.times(tokens, "gate"))
        rows = b.call("init_routing_v2", tokens, choices)
        turned = b.view(b.view(rows, 12, 2, 4), 24, 4)
        return b.weighed(b.multiplied(turned, choices), shares, choices)

    left_alone(build)


@pytest.mark.parametrize("norm", ["add_rms_norm", "add_rms_norm2"])
def test_rows_that_are_the_residual_of_a_norm(norm: str) -> None:
    def build(b: Experts) -> Any:
        tokens = b.normed()
        _, choices = b.chosen(b.times(tokens, "gate"))
        rows = b.call("init_routing_v2", tokens, choices)
        reduced = b.all_reduce(b.call("aten::cat", [b["y"], b["y"]], 0))
        result = b.call(norm, reduced, rows, b["w"], 1e-6)
        return result if norm == "add_rms_norm" else b.graph.getitem(result, 0)

    left_alone(build, {"P1": 2} if norm == "add_rms_norm" else {"P1": 1, "P2": 1})


def test_rows_that_were_routed_by_other_choices() -> None:
    def build(b: Experts) -> Any:
        tokens = b.normed()
        shares, choices = b.chosen(b.times(tokens, "gate"))
        _, others = b.chosen(b.add(b.times(tokens, "gate"), b["gate_bias"]))
        rows = b.call("init_routing_v2", tokens, choices)
        return b.weighed(b.multiplied(rows, others), shares, choices)

    left_alone(build)


def test_an_operand_of_all_tokens_beside_them() -> None:
    def build(b: Experts) -> Any:
        tokens = b.normed()
        return _gated_by(b, tokens, b.add(b.times(tokens, "gate"), b["token_bias"]))

    left_alone(build)


def test_a_gate_of_other_tokens() -> None:
    left_alone(lambda b: _gated_by(b, b.normed(), b.times(b["r"], "gate")))


def _gated_by(b: Experts, tokens: Any, logits: Any) -> Any:
    shares, choices = b.chosen(logits)
    return b.weighed(b.multiplied(b.call("init_routing_v2", tokens, choices), choices), shares, choices)


def test_a_mean_over_the_tokens_is_that_of_all_of_them() -> None:
    def build(b: Experts) -> Any:
        tokens = b.normed()
        logits = b.times(tokens, "gate")
        centred = b.call("aten::sub.Tensor", logits, b.call("aten::mean.dim", logits, [0], True))
        return _gated_by(b, tokens, centred)

    rewritten = check(build, {"P1": 1, "P4": 1})
    assert ops(rewritten).count("all_gather") == 2  # of the logits, for their mean, and of the result


def test_tokens_that_the_group_does_not_divide() -> None:
    left_alone(lambda b: b.experts(b.normed()), {}, (11, 4))
    left_alone(lambda b: b.experts(b.normed()), {}, (1, 4))


def test_as_many_tokens_as_ranks() -> None:
    check(lambda b: b.experts(b.normed()), {"P1": 1, "P4": 1}, (2, 4))


def test_a_tuple_that_is_read_whole() -> None:
    def build(b: Experts) -> Any:
        tokens = b.normed()
        both = b.call("moe_gating_top_k_softmax", b.times(tokens, "gate"), 2)
        shares, choices = b.graph.getitem(both, 0), b.graph.getitem(both, 1)
        rows = b.multiplied(b.call("init_routing_v2", tokens, choices), choices)
        return b.weighed(rows, shares, choices), both

    left_alone(build)


def test_experts_without_a_local_norm() -> None:
    left_alone(lambda b: b.experts(b["r"]), {})


# ---------------------------------------------------------------------------------------------------------------- P5


@pytest.mark.parametrize("shape", LAYOUTS, ids=str)
@pytest.mark.parametrize("mesh", ALL_MESHES.values(), ids=ALL_MESHES)
def test_attention_is_sliced_before_its_projection(mesh: Mesh, shape: tuple[int, ...]) -> None:
    def build(b: Experts) -> Any:
        hidden, residual = b.carried()
        return b.fused(b.times(b.attention(hidden), "wo"), residual)

    rewritten = check(build, {"P2": 2, "P5": 1}, shape, mesh)
    rank = mesh.world_size - 1
    assert ops(rewritten, rank).count("all_gather") == 3  # what attention reads, and both results
    sliced = [n for n in rewritten.graph(rank).nodes if n.name.startswith("attention_shard")]
    members = len(mesh.dim("tp").group(rank))
    (reader,) = sliced[0].users
    assert reader.meta["val"].shape[len(shape) - 2] == shape[-2] // members


@pytest.mark.parametrize("norm", ["add", "add_rms_norm", "swapped"])
def test_every_sum_with_a_local_residual(norm: str) -> None:
    def build(b: Experts) -> Any:
        hidden, residual = b.carried()
        out = b.times(b.attention(hidden), "wo")
        if norm == "add":
            return b.rms_norm(b.add(residual, out))
        return b.add_rms_norm(out, residual) if norm == "add_rms_norm" else b.fused(residual, out)

    check(build, {"P2": 2, "P5": 1} if norm == "swapped" else {"P2": 1, "P3": 1, "P5": 1})


def test_bias_view_and_markers_behind_the_projection() -> None:
    def build(b: Experts) -> Any:
        hidden, residual = b.carried()
        out = b.add(b.times(b.attention(hidden), "wo"), b["bias"])
        return b.fused(b.begin(b.view(out, 12, 4)), residual)

    check(build, {"P2": 2, "P5": 1}, (12, 4))


def test_experts_behind_attention() -> None:
    def build(b: Experts) -> Any:
        hidden, residual = b.carried()
        hidden, residual = b.fused(b.times(b.attention(hidden), "wo"), residual)
        return b.fused(b.experts(hidden), residual)

    check(build, {"P2": 3, "P4": 1, "P5": 1})


def unsliced(build: Build, fires: dict[str, int], shape: tuple[int, ...] = (12, 4)) -> None:
    rewritten = check(build, fires, shape)
    assert not [n for n in rewritten.graph(0).nodes if n.name.startswith("attention_shard")]


def test_a_projection_that_someone_reads_in_full() -> None:
    def build(b: Experts) -> Any:
        hidden, residual = b.carried()
        out = b.times(b.attention(hidden), "wo")
        return b.fused(out, residual), out

    unsliced(build, {"P2": 1})


@pytest.mark.parametrize(("query", "out"), [("wq_v", "wo"), ("wq", "wo_v")])
def test_attention_or_a_projection_that_differs_between_ranks(query: str, out: str) -> None:
    def build(b: Experts) -> Any:
        hidden, residual = b.carried()
        return b.fused(b.times(b.attention(hidden, query), out), residual)

    unsliced(build, {"P2": 1})


def test_a_residual_that_is_not_local() -> None:
    def build(b: Experts) -> Any:
        hidden, _ = b.carried()
        return b.fused(b.times(b.attention(hidden), "wo"), b["r"])

    unsliced(build, {"P2": 1})


def test_a_projection_that_is_not_behind_attention() -> None:
    def build(b: Experts) -> Any:
        hidden, residual = b.carried()
        return b.fused(b.shared(hidden), residual)

    unsliced(build, {"P2": 1})


def test_attention_is_left_alone_where_it_is_not_asked_for() -> None:
    def build(b: Experts) -> Any:
        hidden, residual = b.carried()
        return b.fused(b.times(b.attention(hidden), "wo"), residual)

    check(build, {"P2": 1}, patterns="P1,P2,P3,P4")


# ------------------------------------------------------------------------------------------------------------- defects


def every_kind(b: Experts) -> Any:
    """Experts with a divided shared one, a residual, attention behind them; the choices are returned."""
    hidden, residual = b.carried()
    shares, choices = b.chosen(b.times(hidden, "gate"))
    rows = b.multiplied(b.call("init_routing_v2", hidden, choices), choices)
    routed = b.add(b.weighed(rows, shares, choices), b.all_reduce(b.shared(hidden, "first_s", "second_s")))
    hidden, residual = b.fused(routed, residual)
    hidden, residual = b.fused(b.times(b.attention(hidden), "wo"), residual)
    return b.experts(hidden), residual, choices


def odd_weights(b: Experts) -> Any:
    """A gate, and a projection behind attention, that differ between the ranks."""
    hidden, residual = b.carried()
    hidden, residual = b.fused(b.times(b.attention(hidden), "wo_v"), residual)
    return b.experts(b.normed(), gate="gate_v"), hidden, residual


@pytest.mark.parametrize("name", EXPECTED)
def test_each_defect_shows_in_a_program_made_for_it(name: str) -> None:
    odd = name in ("ExpertWeightsNotCompared", "AddendsTakenForSums")
    original = program(odd_weights if odd else every_kind, mesh=Mesh(2, (MeshDim("tp", ((1, 0),)),)))
    assert findings(original, SequenceParallel()) == set()
    assert findings(original, MUTANTS[name]()) & EXPECTED[name]
