"""The ops of mixture of experts against loops over tokens, in every number domain."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tcverify.domains import Exact, residues
from tcverify.execution import Lockstep, ProcessGroupPool
from tcverify.ops import ShapeError, TensorSpec, infer, lookup, resolve
from tcverify.program import GraphBuilder, InputSpec, Mesh, Program, Recipe, dumps, loads, spmd_program

GENERATOR = torch.Generator()
TOKENS = [(6,), (2, 3), (1, 4), (1,)]


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR.manual_seed(seed), dtype=torch.float64).to(dtype)


def run(name: str, *arguments: Any) -> Any:
    return lookup(resolve(f"tensor_cast::{name}")).require()(*arguments)


def choices(experts: int, k: int, *tokens: int, seed: int = 0, skipped: tuple[int, ...] = ()) -> torch.Tensor:
    """k different experts for each token, none of those that are skipped."""
    allowed = [e for e in range(experts) if e not in skipped]
    picked = [
        [allowed[i] for i in torch.randperm(len(allowed), generator=GENERATOR.manual_seed(seed * 97 + t))[:k].tolist()]
        for t in range(math.prod(tokens))
    ]
    return torch.tensor(picked, dtype=torch.int64).reshape(*tokens, k)


def close(actual: torch.Tensor, expected: Any) -> None:
    assert actual.is_contiguous()
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=1e-12, atol=1e-12)


# ----------------------------------------------------------------------------------- the reference: Python, token by token


def naive_gate(logits: list[float], k: int) -> tuple[list[float], list[int]]:
    chosen: list[int] = []
    for _ in range(k):
        best = None
        for expert, logit in enumerate(logits):
            if expert not in chosen and (best is None or logit > logits[best]):
                best = expert
        assert best is not None
        chosen.append(best)
    total = sum(math.exp(logit) for logit in logits)
    return [math.exp(logits[e]) / total for e in chosen], chosen


def naive_rows(indices: torch.Tensor, experts: int) -> list[tuple[int, int, int]]:
    """(expert, token, choice) of each routed row."""
    picked = indices.reshape(-1, indices.shape[-1]).tolist()
    return [
        (e, t, c) for e in range(experts) for t, of in enumerate(picked) for c, chosen in enumerate(of) if chosen == e
    ]


def naive_experts(
    x: torch.Tensor, logits: torch.Tensor, k: int, w: torch.Tensor, bias: torch.Tensor | None
) -> list[list[float]]:
    """What a block of experts gives for each token: no routing, no groups."""
    flat, gates = x.reshape(-1, x.shape[-1]).tolist(), logits.reshape(-1, logits.shape[-1]).tolist()
    out = []
    for token, gate in zip(flat, gates, strict=True):
        total = [0.0] * w.shape[2]
        for share, expert in zip(*naive_gate(gate, k), strict=True):
            matrix = w[expert].tolist()
            for n in range(w.shape[2]):
                product = sum(token[i] * matrix[i][n] for i in range(len(token)))
                total[n] += share * (product + (0.0 if bias is None else float(bias[expert][n])))
        out.append(total)
    return out


def block(x: torch.Tensor, logits: torch.Tensor, k: int, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The same by the ops."""
    weights, indices = run("moe_gating_top_k_softmax", logits, k)
    rows = run("routed_matmul", run("init_routing_v2", x, indices), w, bias, indices)
    back: torch.Tensor = run("unpermute_tokens", rows, indices)
    return (back * weights.unsqueeze(-1)).sum(-2)


# ---------------------------------------------------------------------------------------------------------------- gating


@pytest.mark.parametrize("tokens", TOKENS, ids=str)
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_gating_is_that_of_a_loop(tokens: tuple[int, ...], k: int) -> None:
    logits = numbers(*tokens, 5, seed=k)
    weights, indices = run("moe_gating_top_k_softmax", logits, k)
    expected = [naive_gate(row, k) for row in logits.reshape(-1, 5).tolist()]
    close(weights.reshape(-1, k), [w for w, _ in expected])
    assert indices.dtype is torch.int64
    assert indices.reshape(-1, k).tolist() == [i for _, i in expected]


def test_of_equal_logits_the_lower_index_comes_first() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert run("moe_gating_top_k_softmax", logits, 4)[1].tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]


def test_all_experts_share_all_of_the_weight() -> None:
    weights, _ = run("moe_gating_top_k_softmax", numbers(7, 4), 4)
    close(weights.sum(-1), [1.0] * 7)


def test_logits_whose_weights_round_to_zero_keep_their_order() -> None:
    logits = torch.tensor([[0.0, -2000.0, 1.0, -1000.0]])
    assert run("moe_gating_top_k_softmax", logits, 4)[1].tolist() == [[2, 0, 3, 1]]


# --------------------------------------------------------------------------------------------------- routing and its inverse


@pytest.mark.parametrize("tokens", TOKENS, ids=str)
@pytest.mark.parametrize("k", [1, 2, 4])
def test_routed_rows_stand_by_expert_and_then_by_token(tokens: tuple[int, ...], k: int) -> None:
    x, indices = numbers(*tokens, 3), choices(5, k, *tokens, seed=k, skipped=(2,))
    flat = x.reshape(-1, 3)
    close(run("init_routing_v2", x, indices), [flat[t].tolist() for _, t, _ in naive_rows(indices, 5)])


@pytest.mark.parametrize("tokens", TOKENS, ids=str)
@pytest.mark.parametrize("k", [1, 2, 4])
def test_unpermuting_puts_each_row_at_its_token_and_choice(tokens: tuple[int, ...], k: int) -> None:
    indices = choices(5, k, *tokens, seed=k)
    rows = numbers(indices.numel(), 3)
    expected = torch.zeros(math.prod(tokens), k, 3, dtype=torch.float64)
    for row, (_, token, choice) in zip(rows, naive_rows(indices, 5), strict=True):
        expected[token, choice] = row
    close(run("unpermute_tokens", rows, indices), expected.reshape(*tokens, k, 3))


def test_rows_of_many_tokens_keep_their_order() -> None:
    """A sort that is not stable shows from 17 elements on."""
    x = torch.arange(400.0).reshape(400, 1)
    indices = torch.arange(400).remainder(2).reshape(400, 1)
    assert run("init_routing_v2", x, indices).flatten().tolist() == [*range(0, 400, 2), *range(1, 400, 2)]
    assert torch.equal(run("unpermute_tokens", run("init_routing_v2", x, indices), indices).flatten(), x.flatten())


# ---------------------------------------------------------------------------------------------------------- products


@pytest.mark.parametrize("tokens", TOKENS, ids=str)
@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_block_of_experts_is_that_of_a_loop(tokens: tuple[int, ...], k: int, with_bias: bool) -> None:
    x, logits, w = numbers(*tokens, 3), numbers(*tokens, 4, seed=k), numbers(4, 3, 5, seed=9)
    bias = numbers(4, 5, seed=8) if with_bias else None
    expected = torch.tensor(naive_experts(x, logits, k, w, bias), dtype=torch.float64)
    close(block(x, logits, k, w, bias).contiguous(), expected.reshape(*tokens, 5))


@pytest.mark.parametrize("chosen", [0, 1, 3])
def test_all_tokens_may_choose_one_expert(chosen: int) -> None:
    x, w = numbers(6, 3), numbers(4, 3, 5)
    close(run("routed_matmul", x, w, None, torch.full((6, 1), chosen)), x @ w[chosen])


def test_the_loads_of_experts_follow_the_indices() -> None:
    x, w = torch.ones(8, 1, dtype=torch.float64), torch.tensor([1.0, 10.0, 100.0, 1000.0]).double().reshape(4, 1, 1)
    indices = torch.tensor([[1, 3], [3, 1], [3, 0], [1, 3]])  # loads 1, 3, 0, 4
    found = run("routed_matmul", x, w, None, indices)
    assert found.flatten().tolist() == [1, 10, 10, 10, 1000, 1000, 1000, 1000]


def test_no_token_at_all() -> None:
    indices = torch.zeros(0, 2, dtype=torch.int64)
    rows = run("init_routing_v2", torch.zeros(0, 3), indices)
    assert rows.shape == (0, 3)
    assert run("routed_matmul", rows, torch.zeros(4, 3, 5), None, indices).shape == (0, 5)
    assert run("unpermute_tokens", rows, indices).shape == (0, 2, 3)


@pytest.mark.parametrize("sizes", [(2, 3, 1), (0, 6, 0), (6, 0, 0)], ids=str)
def test_chunks_are_multiplied_one_by_one(sizes: tuple[int, ...]) -> None:
    x, w = numbers(6, 4), numbers(3, 4, 5)
    biases = [numbers(5, seed=1), None, numbers(5, seed=2)]
    expected, row = torch.zeros(6, 5, dtype=torch.float64), 0
    for size, matrix, bias in zip(sizes, w, biases, strict=True):
        for _ in range(size):
            expected[row] = torch.mv(matrix.t(), x[row]) + (0 if bias is None else bias)
            row += 1
    close(run("grouped_matmul", list(x.split(sizes)), list(w), biases), expected)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("moe_gating_top_k_softmax", (numbers(3, 4), 5), r"cannot choose 5 experts by logits \[3, 4\]"),
        ("moe_gating_top_k_softmax", (numbers(3, 4), 0), r"cannot choose 0 experts"),
        ("moe_gating_top_k_softmax", (torch.zeros(3, 4, dtype=torch.int64), 1), "logits of a floating dtype"),
        ("init_routing_v2", (numbers(3, 4), choices(4, 2, 2)), r"cannot route x \[3, 4\] by indices \[2, 2\]"),
        ("init_routing_v2", (numbers(3, 4), numbers(3, 2)), "needs integers"),
        ("unpermute_tokens", (numbers(5, 4), choices(4, 2, 3)), r"a row per choice: x \[5, 4\], indices \[3, 2\]"),
        ("grouped_matmul", ([numbers(5, 4)], [], []), "1 chunks, 0 matrices and 0 biases"),
        ("grouped_matmul", ([], [], []), "0 chunks"),
        ("grouped_matmul", ([numbers(5, 4)], [numbers(5, 4)], [None]), r"cannot multiply \[5, 4\] by \[5, 4\]"),
        ("grouped_matmul", ([numbers(5, 4)], [numbers(4, 3)], [numbers(4)]), r"biases of shape \[3\], got \[4\]"),
        ("routed_matmul", (numbers(6, 4), numbers(3, 5, 4), None, choices(3, 2, 3)), r"cannot multiply x \[6, 4\]"),
        ("routed_matmul", (numbers(6, 4), numbers(3, 4, 5).float(), None, choices(3, 2, 3)), "one dtype"),
        ("routed_matmul", (numbers(6, 4), numbers(3, 4, 5), numbers(3, 4), choices(3, 2, 3)), r"a bias of shape \[3, 5\]"),
        ("routed_matmul", (numbers(6, 4), numbers(3, 4, 5), None, choices(4, 2, 3) + 1), "3 experts, and indices up to"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(name: str, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(name, *arguments)


def test_what_does_not_fit_is_refused_by_shape_alone() -> None:
    counter = iter(range(100))
    x, indices = TensorSpec.contiguous((3, 4), torch.float32), TensorSpec.contiguous((2, 2), torch.int64)
    with pytest.raises(ShapeError, match=r"cannot route x \[3, 4\] by indices \[2, 2\]"):
        infer(resolve("tensor_cast::init_routing_v2"), (x, indices), {}, counter.__next__)


# ------------------------------------------------------------------------------------------------------------ domains


def exact(op: Callable[..., Any], *arguments: Any, draw: int = 0) -> Any:
    with Exact(draw).running(), torch.no_grad():
        return op(*arguments)


def field_numbers(*shape: int, seed: int) -> torch.Tensor:
    unit = torch.rand(shape, generator=GENERATOR.manual_seed(seed), dtype=torch.float64)
    return residues(2 * unit - 1)


def test_in_the_exact_domain_tokens_are_independent_of_each_other() -> None:
    """Bit for bit: what a rank computes of its tokens is what all of them have there."""
    x, logits, w = field_numbers(8, 3, seed=1), field_numbers(8, 4, seed=2), field_numbers(4, 3, 5, seed=3)
    whole = exact(block, x, logits, 2, w, None)
    parts = [exact(block, x[i : i + 2], logits[i : i + 2], 2, w, None) for i in range(0, 8, 2)]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(exact(block, x.roll(1, 0), logits, 2, w, None), whole)


def test_in_the_exact_domain_experts_are_chosen_by_the_order_of_residues() -> None:
    logits = torch.tensor([[5.0, -7.0, 500000.0, 5.0]], dtype=torch.float64)
    _, indices = exact(lambda x: run("moe_gating_top_k_softmax", x, 4), logits)
    assert indices.tolist() == [[2, 0, 3, 1]]


def test_in_the_exact_domain_experts_may_change_places() -> None:
    """Renumbering the experts changes nothing: weights are sums and quotients of hashes of the logits."""
    x, logits, w = field_numbers(8, 3, seed=1), field_numbers(8, 4, seed=2), field_numbers(4, 3, 5, seed=3)
    turned = [2, 0, 3, 1]
    assert torch.equal(exact(block, x, logits[:, turned], 2, w[turned], None), exact(block, x, logits, 2, w, None))


def test_native_weights_are_rounded_once() -> None:
    op = lookup(resolve("tensor_cast::moe_gating_top_k_softmax"))
    logits = numbers(40, 8, dtype=torch.bfloat16)
    assert op.native is not None
    weights, indices = op.native(logits, 3)
    assert weights.dtype is torch.bfloat16
    assert indices.dtype is torch.int64
    precise, _ = run("moe_gating_top_k_softmax", logits.double(), 3)
    assert torch.equal(weights, precise.float().to(torch.bfloat16))


def program(dtype: torch.dtype = torch.float32) -> Program:
    inputs = [
        InputSpec("x", (6, 4), dtype),
        InputSpec("gate", (4, 3), dtype, recipe=Recipe(scale=2.0)),
        InputSpec("w", (3, 4, 5), dtype),
        InputSpec("a", (4, 5), dtype),
        InputSpec("bias", (3, 5), dtype),
    ]

    def build(b: GraphBuilder) -> Any:
        x, gate, w, a, bias = (b.input(spec.name) for spec in inputs)
        both = b.call("tensor_cast::moe_gating_top_k_softmax", b.call("aten::mm", x, gate), 2)
        weights, indices = b.getitem(both, 0), b.getitem(both, 1)
        rows = b.call("tensor_cast::init_routing_v2", x, indices)
        made = b.call("tensor_cast::routed_matmul", rows, w, bias, indices)
        back = b.call("tensor_cast::unpermute_tokens", made, indices)
        weighed = b.call("aten::mul.Tensor", back, b.call("aten::unsqueeze", weights, -1))
        chunks = b.call("aten::split_with_sizes", rows, [5, 0, 7])
        parts = [b.getitem(chunks, i) for i in range(3)]
        fixed = b.call("tensor_cast::grouped_matmul", parts, [a] * 3, [None, None, None])
        return b.call("aten::sum.dim_IntList", weighed, [-2]), indices, fixed

    return spmd_program(Mesh.grid({"tp": 2}), inputs, build, seed=5)


def test_programs_of_experts_are_written_and_read() -> None:
    text = dumps(program())
    assert dumps(loads(text)) == text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_processes_compute_what_lockstep_does(dtype: torch.dtype, pool: Callable[[int], ProcessGroupPool]) -> None:
    made = program(dtype)
    for mine, theirs in zip(Lockstep().run(made).ranks, pool(2).run(made).ranks, strict=True):
        assert len(mine.outputs) == 3
        for a, b in zip(mine.outputs, theirs.outputs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
