"""Ops in the exact domain: as torch computes them where float64 is exact, by their identities where it is not."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tcverify.domains import Exact, ScrambledReals, residues
from tcverify.domains.exact import field
from tcverify.domains.exact.indexing import CHOOSING, COMPARING, STRUCTURAL, is_structural
from tcverify.domains.exact.ops import EXACT
from tcverify.errors import UnsupportedOp
from tests.domains.test_exact_field import of_fraction

aten = torch.ops.aten
GENERATOR = torch.Generator()
DOMAIN = Exact(0)
INF = math.inf
Op = Callable[..., Any]


def small(*shape: int, seed: int = 0) -> torch.Tensor:
    """Integers from −4 to 4, as float64: what is computed from few of them is exact."""
    numbers = torch.randint(-4, 5, shape, generator=GENERATOR.manual_seed(seed + sum(shape)))
    return numbers.to(torch.float64)


def powers(*shape: int, seed: int = 0) -> torch.Tensor:
    """±1/2, ±1, ±2, …: divisors whose quotients are exact."""
    exponents = torch.randint(-2, 3, shape, generator=GENERATOR.manual_seed(seed))
    return 2.0 ** exponents.double() * (1 - 2 * (exponents % 2).double())


def anything(*shape: int, seed: int = 0) -> torch.Tensor:
    """Residues."""
    unit = torch.rand(shape, generator=GENERATOR.manual_seed(seed + sum(shape)), dtype=torch.float64)
    return residues(2 * unit - 1)


def embedded(value: Any) -> Any:
    """The residues of exact numbers."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        flat = [float(of_fraction(Fraction(x))) if math.isfinite(x) else x for x in value.reshape(-1).tolist()]
        return torch.tensor(flat, dtype=torch.float64).reshape(value.shape)
    return type(value)(map(embedded, value)) if isinstance(value, (list, tuple)) else value


def inside(op: Op, *args: Any, domain: Any = DOMAIN, **kwargs: Any) -> Any:
    with domain.running(), torch.no_grad():
        return op(*args, **kwargs)


def same(actual: Any, expected: Any) -> None:
    if isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            same(one, other)
        return
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(actual, expected), (actual, expected)


X, Y, Z = small(3, 4), small(3, 4, seed=1), small(3, 4, seed=2)
W, V = small(4, 5), small(4)
B, C = small(2, 3, 4), small(2, 4, 5)
D = powers(3, 4)
INDEX = torch.tensor([0, 2, 0])
MASK = X > 0
PLACES = torch.tensor([[0, 1, 1, 0]])
IMAGE, KERNEL = small(1, 2, 5, 4), small(4, 1, 2, 3)

#: Ops that compute, with their arguments in all the ways in which graphs give them.
COMPUTING: dict[str, tuple[Op, tuple[Any, ...], dict[str, Any]]] = {
    "add": (torch.add, (X, Y), {}),
    "add alpha": (torch.add, (X, Y), {"alpha": 3}),
    "add alpha 0.5": (torch.add, (X, Y), {"alpha": 0.5}),
    "add scalar": (aten.add.Scalar, (X, 0.25, 2), {}),
    "add of int": (torch.add, (INDEX, small(3)), {}),
    "sub": (torch.sub, (X, Y), {"alpha": 2}),
    "sub broadcast": (torch.sub, (X, V), {}),
    "rsub": (aten.rsub.Scalar, (X, 1.5, 2), {}),
    "mul": (torch.mul, (X, Y), {}),
    "mul bool": (torch.mul, (X, MASK), {}),
    "mul of ints by a float": (torch.mul, (INDEX, 0.5), {}),
    "div": (torch.div, (X, D), {}),
    "div scalar": (torch.div, (X, 8), {}),
    "div of ints": (torch.div, (INDEX, torch.tensor([1, 2, 4])), {}),
    "reciprocal": (torch.reciprocal, (D,), {}),
    "neg": (torch.neg, (X,), {}),
    "square": (torch.square, (X,), {}),
    "pow 3": (torch.pow, (X, 3), {}),
    "pow 2.0": (torch.pow, (X, 2.0), {}),
    "pow −1": (torch.pow, (D, -1), {}),
    "addcmul": (torch.addcmul, (X, Y, Z), {"value": 0.5}),
    "addcdiv": (torch.addcdiv, (X, Y, D), {"value": 2}),
    "lerp": (torch.lerp, (X, Y, 0.25), {}),
    "lerp tensor": (torch.lerp, (X, Y, D), {}),
    "mm": (torch.mm, (X, W), {}),
    "bmm": (torch.bmm, (B, C), {}),
    "mv": (torch.mv, (X, V), {}),
    "dot": (torch.dot, (V, small(4, seed=9)), {}),
    "matmul": (torch.matmul, (B, W), {}),
    "linear": (F.linear, (X, small(5, 4), small(5)), {}),
    "addmm": (torch.addmm, (small(5), X, W), {"beta": 0.5, "alpha": 2}),
    "addmv": (torch.addmv, (small(3), X, V), {"beta": 2}),
    "baddbmm": (torch.baddbmm, (small(2, 3, 5), B, C), {"alpha": -1}),
    "addbmm": (torch.addbmm, (small(3, 5), B, C), {"beta": 2, "alpha": 3}),
    "addr": (torch.addr, (X, small(3), V), {"beta": 2}),
    "einsum": (torch.einsum, ("bij,bjk->ik", B, C), {}),
    "outer": (torch.outer, (small(3), V), {}),
    "conv2d": (F.conv2d, (IMAGE, KERNEL, small(4)), {"stride": (2, 1), "padding": 1, "groups": 2}),
    "conv_transpose1d": (F.conv_transpose1d, (small(1, 2, 5), small(2, 3, 2)), {"stride": 2}),
    "sum": (torch.sum, (X,), {}),
    "sum dims": (torch.sum, (B, (0, -1)), {}),
    "sum keepdim": (torch.sum, (X, -1, True), {}),
    "sum no dims": (aten.sum.dim_IntList, (X, []), {}),
    "sum of ints as floats": (torch.sum, (INDEX,), {"dtype": torch.float64}),
    "sum 0-d": (torch.sum, (X[0, 0],), {}),
    "mean": (torch.mean, (X, 1), {"keepdim": True}),
    "mean all": (torch.mean, (small(4, 4),), {}),
    "mean dims": (torch.mean, (small(2, 3, 2), (0, 2)), {}),
    "cumsum": (torch.cumsum, (X, 0), {}),
    "cumprod": (torch.cumprod, (X, -1), {}),
    "prod": (torch.prod, (X,), {}),
    "prod dim": (torch.prod, (X, 1), {"keepdim": True}),
    "var biased": (aten.var.default, (small(2, 4), False), {}),
    "var_mean": (torch.var_mean, (small(4, 3), 0), {"correction": 0}),
    "norm 1": (torch.linalg.vector_norm, (X, 1), {"dim": 1}),
    "index_add": (torch.index_add, (X, 0, INDEX, Y), {"alpha": 2}),
    "scatter_add": (torch.scatter_add, (X, 0, PLACES, Y), {}),
    "index_put": (torch.index_put, (X, (INDEX,), Y), {"accumulate": True}),
    "masked_fill": (torch.masked_fill, (X, MASK, 0.5), {}),
    "masked_fill inf": (torch.masked_fill, (X, MASK, -INF), {}),
    "where": (torch.where, (MASK, X, 0.25), {}),
    "where of scalars": (torch.where, (MASK, 0.25, Y), {}),
    "fill": (torch.full_like, (X, 0.25), {}),
    "scatter value": (torch.scatter, (X, 0, PLACES, 0.25), {}),
    "scatter": (torch.scatter, (X, 0, PLACES, Y), {}),
    "pad": (F.pad, (X, (1, 2)), {"value": 0.5}),
    "masked_scatter": (torch.masked_scatter, (X, MASK, Y), {}),
    "index_fill": (torch.index_fill, (X, 0, INDEX, 0.5), {}),
    "avg by unfold": (lambda x: x.unfold(1, 2, 2).mean(-1), (X,), {}),
    "full": (torch.full, ((2,), 0.25), {"dtype": torch.float64}),
    "arange": (torch.arange, (0, 1, 0.25), {"dtype": torch.float64}),
    "in place": (lambda x, y: x.clone().mul_(y).add_(y, alpha=2).div_(4), (X, Y), {}),
    "out": (lambda x, y: torch.mul(x, y, out=torch.empty_like(x)), (X, Y), {}),
    "an int as float": (lambda i: i.to(torch.float64), (INDEX,), {}),
    "a comparison as float": (lambda x: (x > 0).to(torch.float64), (X,), {}),
    "a view written": (lambda x: x.clone().t()[1:].mul_(0.5).t(), (X,), {}),
    "of nothing": (lambda x: torch.cat([x[:0].mm(W), x.mm(W)]), (X,), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPUTING)
def test_an_op_computes_the_residue_of_what_torch_computes(name: str) -> None:
    op, args, kwargs = COMPUTING[name]
    same(inside(op, *embedded(args), **kwargs), embedded(op(*args, **kwargs)))


NUMBERS = st.lists(st.fractions(-50, 50, max_denominator=50), min_size=3, max_size=3)


@given(NUMBERS, NUMBERS)
@settings(max_examples=40, deadline=None)
def test_arithmetic_is_that_of_fractions(left: list[Fraction], right: list[Fraction]) -> None:
    def of(values: list[Fraction]) -> torch.Tensor:
        return torch.tensor([float(of_fraction(v)) for v in values], dtype=torch.float64)

    a, b = of(left), of(right)
    mean = sum(left) / 3
    variance = sum((v - mean) ** 2 for v in left)
    same(inside(torch.add, a, b, alpha=0.1), of([x + y / 10 for x, y in zip(left, right, strict=True)]))
    same(inside(torch.div, a, b), of([x / y if y else Fraction(0) for x, y in zip(left, right, strict=True)]))
    same(inside(torch.mean, a), of([mean])[0])
    same(inside(torch.var, a), of([variance / 2])[0])
    same(inside(torch.var, a, correction=0), of([variance / 3])[0])
    same(inside(torch.dot, a, b), of([sum(x * y for x, y in zip(left, right, strict=True)) + Fraction(0)])[0])


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (torch.amax, (1,)), (torch.amin, (1, True)), (torch.max, ()), (torch.max, (1,)), (torch.argmax, (1,)),
        (torch.sort, (1, True)), (torch.argsort, ()), (torch.topk, (2,)), (torch.topk, (2, 0, False)), (torch.abs, ()),
        (torch.relu, ()), (torch.sign, ()), (torch.clamp, (-3.0, 5.0)), (torch.clamp_min, (0,)), (F.hardtanh, ()),
        (torch.cummax, (0,)), (torch.median, (1,)), (torch.aminmax, ()), (torch.gt, (2.0,)), (torch.eq, (2.0,)),
    ],
)  # fmt: skip
def test_the_order_is_that_of_symmetric_residues(op: Op, args: tuple[Any, ...]) -> None:
    x = anything(4, 5)
    expected = op(x, *args)
    expected = tuple(expected) if isinstance(expected, tuple) else expected
    same(inside(op, x, *args), expected)


def test_ties_stay_in_the_order_of_their_index() -> None:
    ties = torch.tensor([[2.0, 1.0, 2.0, 1.0, 2.0] * 20], dtype=torch.float64)
    for found in (inside(torch.sort, ties, 1, True), inside(torch.topk, ties, 60)):
        assert found[1][0, :60].tolist() == [i for i in range(100) if i % 5 in (0, 2, 4)]
    assert inside(torch.argsort, ties)[0, :40].tolist() == [i for i in range(100) if i % 5 in (1, 3)]


P_, Q_ = anything(4, 6), anything(4, 6, seed=5)
ROWS = anything(3, 4, 6, seed=6)

SCALE = math.sqrt(1 / math.sqrt(6))  # as torch computes it

#: Pairs of expressions that are equal in the field.
KEPT: dict[str, tuple[Op, Op]] = {
    "a sum in another order": (lambda x, y: (x + y).sum(), lambda x, y: y.flip(0).sum() + x.sum(0).sum()),
    "a mean by parts": (lambda x, y: x.mean(1), lambda x, y: (x[:, :2].mean(1) + 2 * x[:, 2:].mean(1)) / 3),
    "distributivity": (lambda x, y: (x + y) @ x.t(), lambda x, y: x @ x.t() + y @ x.t()),
    "split over K": (lambda x, y: x @ y.t(), lambda x, y: x[:, :4] @ y[:, :4].t() + x[:, 4:] @ y[:, 4:].t()),
    "associativity of matmul": (lambda x, y: (x @ y.t()) @ x, lambda x, y: x @ (y.t() @ x)),
    "division by a literal": (lambda x, y: x / 3, lambda x, y: x * (1 / 3)),
    "a quotient, multiplied back": (lambda x, y: x / y * y, lambda x, y: x),
    "variance by squares": (lambda x, y: x.var(1, correction=0), lambda x, y: (x * x).mean(1) - x.mean(1) ** 2),
    "rms_norm": (
        lambda x, y: F.rms_norm(x, (6,), y[0], 1e-6), lambda x, y: x * torch.rsqrt((x**2).mean(1, True) + 1e-6) * y[0],
    ),
    "layer_norm": (
        lambda x, y: F.layer_norm(x, (6,), y[0], y[1], 1e-5),
        lambda x, y: (x - x.mean(1, True)) / (x.var(1, correction=0, keepdim=True) + 1e-5).sqrt() * y[0] + y[1],
    ),
    "variance by parts": (
        lambda x, y: ROWS.var((0, 2), correction=2, keepdim=True),
        lambda x, y: (ROWS - ROWS.mean((0, 2), True)).square().sum((0, 2), True) / 16,
    ),
    "silu": (lambda x, y: F.silu(x), lambda x, y: x / (1 + torch.exp(-x))),
    "gelu": (lambda x, y: F.gelu(x), lambda x, y: 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))),
    "gelu by tanh": (
        lambda x, y: F.gelu(x, approximate="tanh"),
        lambda x, y: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))),
    ),
    "softmax": (
        lambda x, y: x.softmax(1), lambda x, y: (e := (x - x.amax(1, True)).exp()) / e.sum(1, True),
    ),
    "softmax of a constant more": (lambda x, y: x.softmax(1), lambda x, y: torch.exp(F.pad(x, (0, 0)).sub(
        x.amax(1, True))).div(torch.exp(x - x.amax(1, True)).sum(1, True))),
    "log_softmax": (lambda x, y: x.log_softmax(1), lambda x, y: x - x.logsumexp(1, True)),
    "masked softmax": (
        lambda x, y: x.masked_fill(y > 0, -INF).softmax(1),
        lambda x, y: (torch.zeros_like(x).masked_fill(y > 0, -INF) + x).softmax(1),
    ),
    "expm1": (lambda x, y: torch.expm1(x), lambda x, y: torch.exp(x) - 1),
    "log1p": (lambda x, y: torch.log1p(x), lambda x, y: torch.log(1 + x)),
    "softplus": (lambda x, y: F.softplus(x), lambda x, y: torch.log(1 + torch.exp(x))),
    "pow 1/2": (lambda x, y: x**0.5, lambda x, y: x.sqrt()),
    "pow −1/2": (lambda x, y: x**-0.5, lambda x, y: 1 / x.sqrt()),
    "std": (lambda x, y: x.std(1), lambda x, y: x.var(1).sqrt()),
    "norm": (lambda x, y: torch.linalg.vector_norm(x, dim=1), lambda x, y: (x * x).sum(1).sqrt()),
    "relu by max": (lambda x, y: x.relu(), lambda x, y: torch.maximum(x, torch.zeros_like(x))),
    "relu by where": (lambda x, y: x.relu(), lambda x, y: torch.where(x > 0, x, 0.0)),
    "relu by abs": (lambda x, y: x.relu(), lambda x, y: (x + x.abs()) / 2),
    "max by parts": (lambda x, y: x.amax(1), lambda x, y: torch.maximum(x[:, 3:].amax(1), x[:, :3].amax(1))),
    "min by max": (torch.minimum, lambda x, y: -torch.maximum(-x, -y)),
    "max and min": (lambda x, y: torch.maximum(x, y) + torch.minimum(x, y), lambda x, y: x + y),
    "|x|²": (lambda x, y: x.abs() ** 2, lambda x, y: x * x),
    "odd": (lambda x, y: torch.tanh(-x) + torch.sin(x), lambda x, y: -torch.tanh(x) - torch.sin(-x)),
    "even": (lambda x, y: torch.cos(-x), lambda x, y: torch.cos(x)),
    "unknown elementwise": (lambda x, y: torch.lgamma(x + y), lambda x, y: torch.lgamma(y + x)),
    "attention": (
        lambda x, y: F.scaled_dot_product_attention(ROWS, ROWS, ROWS),
        lambda x, y: ((ROWS * SCALE) @ (ROWS * SCALE).mT).softmax(-1) @ ROWS,
    ),
    "casts": (lambda x, y: (x.half() + y.float()).bfloat16(), lambda x, y: x + y),
}  # fmt: skip

#: Equal in the reals, and not in the field; see docs/exact.md.
NOT_KEPT: dict[str, tuple[Op, Op]] = {
    "exp of a sum": (lambda x, y: torch.exp(x + y), lambda x, y: torch.exp(x) * torch.exp(y)),
    "the square of a root": (lambda x, y: x.sqrt() ** 2, lambda x, y: x),
    "softmax without its max": (lambda x, y: x.softmax(1), lambda x, y: x.exp() / x.exp().sum(1, True)),
    "log of exp": (lambda x, y: x.exp().log(), lambda x, y: x),
    "log of a square": (lambda x, y: torch.log(x * x), lambda x, y: 2 * torch.log(x)),
    "tanh by sigmoid": (lambda x, y: torch.tanh(x), lambda x, y: 2 * torch.sigmoid(2 * x) - 1),
    "sine and cosine": (lambda x, y: x.sin() ** 2 + x.cos() ** 2, lambda x, y: torch.ones_like(x)),
    "relu of a multiple": (lambda x, y: (3 * x).relu(), lambda x, y: 3 * x.relu()),
    "max, shifted": (lambda x, y: torch.maximum(x + y, y), lambda x, y: torch.maximum(x, torch.zeros_like(x)) + y),
    "√2 squared": (lambda x, y: x * math.sqrt(2) * math.sqrt(2), lambda x, y: x * 2),
}


def both(pair: tuple[Op, Op], domain: Any = DOMAIN) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = P_.clone(), Q_.clone()
    if not isinstance(domain, Exact):
        x, y = x / field.H, y / field.H
    left, right = (inside(side, x, y, domain=domain) for side in pair)
    return left, right


@pytest.mark.parametrize("name", KEPT)
def test_an_identity_is_kept(name: str) -> None:
    same(*both(KEPT[name]))


@pytest.mark.parametrize("name", NOT_KEPT)
def test_an_identity_is_not_kept_and_exchanging_functions_shows_that(name: str) -> None:
    left, right = both(NOT_KEPT[name])
    assert float((left != right).double().mean()) > 0.1
    if name != "√2 squared":
        left, right = both(NOT_KEPT[name], ScrambledReals())
        assert float((left - right).abs().max()) > 1e-3


@pytest.mark.parametrize("name", KEPT)
def test_a_kept_identity_holds_where_functions_are_exchanged(name: str) -> None:
    left, right = both(KEPT[name], ScrambledReals())
    assert bool((left.isfinite() == right.isfinite()).all())
    difference = (left - right).abs().nan_to_num(0.0, 0.0, 0.0)
    assert float(difference.max()) <= 1e-9 * float(left.abs().nan_to_num(0.0, 0.0, 0.0).max())


def test_results_are_residues_whatever_the_op() -> None:
    for left, right in (*KEPT.values(), *NOT_KEPT.values()):
        for found in both((left, right)):
            assert bool(((found == found.round()) & (found.abs() <= field.H)).all())


#: What is refused, and what the sentence says.
REFUSED: dict[str, tuple[Op, str]] = {
    "a cast to integers": (lambda x: x.to(torch.int64), "no casts from floating to integer"),
    "a sum as integers": (lambda x: torch.sum(x, dtype=torch.int64), "no casts from floating to integer"),
    "a copy into integers": (lambda x: torch.zeros(4, 6, dtype=torch.int64).copy_(x), "no casts from floating"),
    "NaN": (lambda x: torch.where(x > 0, x, math.nan), "no NaN"),
    "inf − inf": (lambda x: (x.masked_fill(x == x, INF)) - x.masked_fill(x == x, INF), "no NaN"),
    "inf · x": (lambda x: x.masked_fill(x > 0, INF) * 2, "infinities"),
    "√inf": (lambda x: x.masked_fill(x > 0, INF).sqrt(), "infinities"),
    "inf in a matmul": (lambda x: x.masked_fill(x > 0, INF) @ x.t(), "infinities"),
    "x to the y": (lambda x: x**x, "no power of two tensors"),
    "a mean of nothing": (lambda x: x[:0].mean(), "cannot divide by 0"),
    "a variance of one": (lambda x: x[:1].var(0), "cannot divide by 0"),
    "a complex number": (lambda x: torch.complex(x, x), "no complex numbers"),
    "an inverse": (lambda x: torch.linalg.inv(x[:4, :4]), "no meaning"),
    "the cube norm": (lambda x: torch.linalg.vector_norm(x, 3), "no norm of order 3"),
    "random numbers": (torch.rand_like, "no meaning"),
    "a value": (lambda x: x.sum().item(), "no meaning"),
    "scatter with reduce": (lambda x: x.scatter(0, PLACES, x, reduce="multiply"), "reduce"),
    "a bit pattern": (lambda x: x.view(torch.int64), "no bit patterns"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_field_cannot_do_is_refused_by_name(name: str) -> None:
    op, sentence = REFUSED[name]
    with pytest.raises(UnsupportedOp, match=sentence):
        inside(op, P_.clone())


def test_constants_of_graphs_are_read_as_literals() -> None:
    values = torch.tensor([[0.1, 0.5], [1 / 3, 2.0]], dtype=torch.float64)
    with DOMAIN.running():
        found = DOMAIN.constant(values)
    same(found, torch.tensor([[field.residue(v) for v in row] for row in values.tolist()], dtype=torch.float64))
    many = torch.rand(200, 200, generator=GENERATOR.manual_seed(0), dtype=torch.float64)
    with pytest.raises(UnsupportedOp, match="different values"):
        DOMAIN.constant(many)


def test_tensors_that_code_makes_are_read_as_literals() -> None:
    same(inside(lambda x: x * torch.tensor(0.5) * torch.tensor([2.0]), P_), P_)


def test_every_name_stands_in_one_table() -> None:
    tables: list[set[str]] = [set(EXACT), set(STRUCTURAL), set(CHOOSING), set(COMPARING)]
    assert sum(map(len, tables)) == len(set().union(*tables))
    assert is_structural("view_copy")
    assert not is_structural("add")
    for name in set().union(*tables) - {"true_divide", "divide", "softmax", "log_softmax", "lift"}:
        assert hasattr(aten, name), name
