"""Ops of aten and prims that captured graphs hold: primitives, devices, dropout, numbers, gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tcverify import verify
from tcverify.campaign.search.synthesis import synthesise_calls
from tcverify.domains import NATIVE, Exact
from tcverify.errors import ProgramError, UnsupportedOp
from tcverify.execution import Lockstep
from tcverify.ops import TensorSpec, infer, lookup, qualified_name, resolve
from tcverify.program import InputSpec, Mesh, Program, dumps, loads, spmd_program
from tcverify.program.builder import GraphBuilder

TP = Mesh.grid({"tp": 2})
CUDA = torch.device("cuda", 0)


def program(build: Callable[[GraphBuilder, Any], Any], *shapes: tuple[int, ...]) -> Program:
    inputs = [InputSpec(f"x{i}", shape) for i, shape in enumerate(shapes or ((4, 6),))]
    return spmd_program(TP, inputs, lambda b: build(b, *[b.input(spec.name) for spec in inputs]))


def outputs(made: Program, **domain: Any) -> list[Any]:
    run = Lockstep().run(made, **domain)
    assert run.finished, run.why
    return run.ranks[0].outputs


def x_of(made: Program, place: int = 0) -> torch.Tensor:
    return made.values(0)[place].double()


PRIMS: dict[str, tuple[Callable[[GraphBuilder, Any], Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "convert_element_type": (lambda b, x: b.call("prims::convert_element_type", x, torch.bfloat16), lambda x: x),
    "iota": (
        lambda b, x: b.call(
            "aten::mul.Tensor",
            x,
            b.call("prims::iota", 6, start=1, step=2, dtype=torch.int64, device=CUDA, requires_grad=False),
        ),
        lambda x: x * torch.arange(1, 13, 2),
    ),
    "device_put": (lambda b, x: b.call("prims::device_put", x, CUDA), lambda x: x),
    "broadcast_in_dim": (
        lambda b, x: b.call("prims::broadcast_in_dim", x, [3, 4, 6], [1, 2]), lambda x: x.expand(3, 4, 6),
    ),
    "fma": (lambda b, x: b.call("prims::fma", x, x, x), lambda x: x * x + x),
    "sum": (lambda b, x: b.call("prims::sum", x, [1]), lambda x: x.sum(1)),
    "amax": (lambda b, x: b.call("prims::amax", x, [0]), lambda x: x.amax(0)),
    "var": (lambda b, x: b.call("prims::var", x, [1], 0.0), lambda x: x.var(1, correction=0)),
    "rsqrt": (
        lambda b, x: b.call("prims::rsqrt", b.call("prims::add", b.call("prims::mul", x, x), 1.0)),
        lambda x: (x * x + 1).rsqrt(),
    ),
    "transpose": (lambda b, x: b.call("prims::transpose", x, [1, 0]), lambda x: x.t()),
    "where": (
        lambda b, x: b.call("prims::where", b.call("prims::lt", x, 0.0), b.call("prims::neg", x), x), lambda x: x.abs(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PRIMS)
def test_primitives_run_in_every_domain_and_stand_in_files(name: str) -> None:
    build, expected = PRIMS[name]
    made = program(build)
    assert dumps(loads(dumps(made))) == dumps(made)
    torch.testing.assert_close(outputs(loads(dumps(made)))[0], expected(x_of(made)))
    outputs(made, domain=NATIVE)
    assert bool((outputs(made, domain=Exact(0))[0] == outputs(made, domain=Exact(0))[0]).all())
    assert verify(lambda module: module, made, domain="exact").notes == []


def test_a_primitive_is_what_aten_says_residue_by_residue() -> None:
    pairs: list[tuple[Callable[[GraphBuilder, Any], Any], Callable[[GraphBuilder, Any], Any]]] = [
        (lambda b, x: b.call("prims::fma", x, x, x), lambda b, x: b.call("aten::addcmul", x, x, x)),
        (lambda b, x: b.call("prims::div", x, 3.0), lambda b, x: b.call("aten::mul.Tensor", x, 1 / 3)),
        (lambda b, x: b.call("prims::exp", x), lambda b, x: b.call("aten::exp", x)),
        (lambda b, x: b.call("prims::sum", x, [0, 1]), lambda b, x: b.call("aten::sum", x)),
        (
            lambda b, x: b.call("prims::full", [6], 0.1, dtype=torch.float32, device=CUDA, requires_grad=False),
            lambda b, x: b.call("aten::full", [6], 0.1, dtype=torch.float32),
        ),
    ]
    for prim, aten in pairs:
        mine, theirs = (outputs(program(build), domain=Exact(0))[0] for build in (prim, aten))
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("prims::normal", "its result is random"),
        ("prims::inductor_random", "its result is random"),
        ("prims::view_of_dtype", "reads the bits of values"),
        ("prims::resize", "uninitialised memory"),
        ("prims::_make_token", "orders effects"),
        ("aten::bernoulli", "its result is random"),
        ("aten::rand", "its result is random"),
        ("aten::randn_like", "its result is random"),
    ],
)
def test_what_has_no_meaning_has_a_reason(name: str, reason: str) -> None:
    packet = resolve_packet(name)
    assert reason in lookup(packet).reason


def test_overloads_of_torchscript_are_not_called() -> None:
    """torch crashes where `to.prim_dtype` is given no dtype, which is its default."""
    for overload in ("prim_dtype", "prim_Device", "prim_other"):
        assert "write aten::to.dtype" in lookup(getattr(torch.ops.aten.to, overload)).reason
    assert synthesise_calls("aten::to.prim_dtype") == []


def resolve_packet(name: str) -> Any:
    import torch._inductor.inductor_prims

    namespace, _, base = name.partition("::")
    return getattr(getattr(torch.ops, namespace), base).default


@pytest.mark.parametrize("name", ["prims::nothing_of_the_kind", "prims::os", "aten::__import__"])
def test_names_that_are_no_ops_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedOp):
        resolve(name)


@pytest.mark.parametrize("op", ["bucketize", "searchsorted"])
@pytest.mark.parametrize("ordered", [True, False])
def test_what_lies_between_boundaries_that_are_not_sorted_is_undefined(op: str, ordered: bool) -> None:
    def build(b: GraphBuilder, x: Any, edges: Any) -> Any:
        edges = b.getitem(b.call("aten::sort", edges, 0), 0) if ordered else edges
        return b.call(f"aten::{op}.Tensor", *((x, edges) if op == "bucketize" else (edges, x)))

    made = program(build, (4,), (6,))
    run = Lockstep().run(made)
    assert run.finished == ordered
    if ordered:
        edges = x_of(made, 1).sort().values
        assert torch.equal(run.ranks[0].outputs[0], torch.bucketize(x_of(made), edges))
        outputs(made, domain=NATIVE)
    else:
        assert "not sorted" in str(run.why)
        assert verify(lambda module: module, made).status == "inconclusive"


@pytest.mark.parametrize("pixels", [(), (2, 2)])
@pytest.mark.parametrize("ignored", [-100, 0])
def test_targets_that_are_no_classes_are_refused(ignored: int, pixels: tuple[int, ...]) -> None:
    """Its kernel would write outside of its result."""
    op = "aten::nll_loss2d_backward" if pixels else "aten::nll_loss_backward"

    def build(b: GraphBuilder, x: Any, grad: Any) -> Any:
        classes = b.call("aten::full", [1, *pixels], -100, dtype=torch.int64)
        total = b.call("aten::full", [], 1.0)
        return b.call(op, grad, x, classes, None, 0, ignored, total)

    run = Lockstep().run(program(build, (1, 2, *pixels), (1, *pixels)))
    assert run.finished == (ignored == -100)
    assert run.finished or "none of 2 classes" in str(run.why)


# ------------------------------------------------------------------------------------------------------------- devices


@pytest.mark.parametrize("device", ["cuda:0", "cuda", "cpu", "xpu:1"])
def test_what_was_written_for_another_device_runs_here(device: str) -> None:
    where = torch.device(device)

    def build(b: GraphBuilder, x: Any) -> Any:
        ones = b.call("aten::full", [6], 1.5, dtype=torch.float32, device=where, pin_memory=False)
        steps = b.call("aten::arange", 6, device=where)
        moved = b.call("aten::_to_copy", x, dtype=torch.float32, device=where)
        return b.call("aten::add.Tensor", b.call("aten::mul.Tensor", moved, ones), steps)

    made = program(build)
    again = loads(dumps(made))
    assert dumps(again) == dumps(made)
    assert any(n.kwargs.get("device") == where for n in again.graphs[0].nodes)
    torch.testing.assert_close(outputs(again)[0], x_of(made) * 1.5 + torch.arange(6))


def test_a_device_that_torch_does_not_know_is_refused() -> None:
    text = dumps(program(lambda b, x: b.call("aten::full_like", x, 1.0, device=torch.device("cuda"))))
    with pytest.raises(ProgramError, match="is not an argument"):
        loads(text.replace('"cuda"', '"nowhere"'))


# ------------------------------------------------------------------------------------------------------ random numbers


@pytest.mark.parametrize(("p", "train"), [(0.0, True), (0.5, False)])
def test_dropout_that_drops_nothing_is_the_identity(p: float, train: bool) -> None:
    made = program(lambda b, x: b.getitem(b.call("aten::native_dropout", x, p, train), 0))
    for domain in ("float64", "native", "exact"):
        assert verify(lambda module: module, made, domain=domain).status == "passed"
    assert torch.equal(outputs(made)[0], x_of(made))
    plain = program(lambda b, x: b.call("aten::dropout", x, p, train))
    assert torch.equal(outputs(plain)[0], x_of(plain))


def test_dropout_that_drops_is_inconclusive_and_says_why() -> None:
    made = program(lambda b, x: b.getitem(b.call("aten::native_dropout", x, 0.5, True), 0))
    verdict = verify(lambda module: module, made)
    assert verdict.status == "inconclusive"
    assert "aten::native_dropout" in verdict.doubts[0].detail
    assert "random (p=0.5)" in verdict.doubts[0].detail


# ------------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [
        (torch.sym_max, (3, 5), 5), (torch.sym_min, (3, 5), 3), (torch.sym_not, (True,), False), (torch.sym_int, (2.5,), 2),
        (torch.sym_float, (2,), 2.0), (torch.sym_ite, (True, 4, 6), 4), (pow, (2, 3), 8), (abs, (-2,), 2),
    ],
)  # fmt: skip
def test_numbers_are_computed_as_python_does(function: Any, args: tuple[Any, ...], expected: Any) -> None:
    import operator

    function = {pow: operator.pow, abs: operator.abs}.get(function, function)
    name = qualified_name(function)
    assert name.startswith("python::")
    assert resolve(name) is function
    assert lookup(function).require()(*args) == expected


def test_sizes_are_numbers_of_the_graph() -> None:
    made = program(
        lambda b, x: b.call("aten::expand", b.call("aten::new_ones", x, [1]), [b.call("aten::sym_size.int", x, 1)])
    )
    assert outputs(made)[0].shape == (6,)
    assert infer(resolve("aten::sym_size.int"), (TensorSpec.contiguous((4, 6), torch.float32), 0), {}, lambda: 0) == 4


# ----------------------------------------------------------------------------------------------------------- gradients

#: Backwards in the field: the op and the formula of it in other ops, both as programs of (grad, x).
FORMULAS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "silu": (
        lambda b, g, x: b.call("aten::silu_backward", g, x),
        lambda b, g, x: b.call(
            "aten::mul.Tensor",
            g,
            b.call(
                "aten::add.Tensor",
                (s := b.call("aten::sigmoid", x)),
                b.call("aten::mul.Tensor", b.call("aten::mul.Tensor", x, s), b.call("aten::rsub.Scalar", s, 1)),
            ),
        ),
    ),
    "tanh": (
        lambda b, g, x: b.call("aten::tanh_backward", g, b.call("aten::tanh", x)),
        lambda b, g, x: b.call(
            "aten::sub.Tensor", g, b.call("aten::mul.Tensor", g, b.call("aten::square", b.call("aten::tanh", x)))
        ),
    ),
    "relu": (
        lambda b, g, x: b.call("aten::threshold_backward", g, b.call("aten::relu", x), 0),
        lambda b, g, x: b.call("aten::mul.Tensor", g, b.call("aten::gt.Scalar", x, 0)),
    ),
    "softmax": (
        lambda b, g, x: b.call("aten::_softmax_backward_data", g, b.call("aten::_softmax", x, 1, False), 1, torch.float32),
        lambda b, g, x: b.call(
            "aten::mul.Tensor",
            (s := b.call("aten::_softmax", x, 1, False)),
            b.call("aten::sub.Tensor", g, b.call("aten::sum.dim_IntList", b.call("aten::mul.Tensor", g, s), [1], True)),
        ),
    ),
    "dropout": (
        lambda b, g, x: b.call("aten::native_dropout_backward", g, b.call("aten::gt.Scalar", x, 0), 2.0),
        lambda b, g, x: b.call(
            "aten::where.self", b.call("aten::gt.Scalar", x, 0), b.call("aten::add.Tensor", g, g), b.call("aten::zeros_like", g)
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
def test_the_field_knows_the_formula_of_a_backward(name: str) -> None:
    mine, formula = (program(build, (4, 6), (4, 6)) for build in FORMULAS[name])
    torch.testing.assert_close(outputs(mine)[0], outputs(formula)[0], rtol=1e-12, atol=1e-12)
    for draw in range(2):
        assert torch.equal(outputs(mine, domain=Exact(draw))[0], outputs(formula, domain=Exact(draw))[0])


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_backward_is_that_of_autograd_in_the_algebra_of_the_reals(approximate: str) -> None:
    """The formula that the field uses, read in doubles."""
    from tcverify.domains.exact.ops import EXACT

    class Reals:
        """Sums and products as they are."""

        multiply = staticmethod(torch.mul)
        power = staticmethod(torch.pow)

        @staticmethod
        def settle(x: torch.Tensor) -> torch.Tensor:
            return x

        @staticmethod
        def literal(value: Any) -> Any:
            return value

        @staticmethod
        def function(name: str, x: torch.Tensor) -> torch.Tensor:
            return getattr(torch, name)(x)

    x, grad = torch.randn(2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x.requires_grad_()
    (expected,) = torch.autograd.grad(F.gelu(x, approximate=approximate), x, grad)
    torch.testing.assert_close(
        EXACT["gelu_backward"](Reals, grad, x.detach(), approximate), expected, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("name", ["native_layer_norm", "_fused_rms_norm"])
def test_backwards_of_norms_run_in_every_domain(name: str) -> None:
    def build(b: GraphBuilder, g: Any, x: Any, w: Any) -> Any:
        if name == "native_layer_norm":
            made = b.call("aten::native_layer_norm", x, [6], w, None, 1e-5)
            more = [b.getitem(made, 1), b.getitem(made, 2), w, None, [True, True, False]]
        else:
            made = b.call("aten::_fused_rms_norm", x, [6], w, 1e-5)
            more = [b.getitem(made, 1), w, [True, True]]
        back = b.call(f"aten::{name}_backward", g, x, [6], *more)
        return b.getitem(back, 0), b.getitem(back, 1)

    made = program(build, (4, 6), (4, 6), (6,))
    g, x, w = (x_of(made, place).requires_grad_() for place in range(3))
    forward = F.layer_norm(x, [6], w, None, 1e-5) if name == "native_layer_norm" else F.rms_norm(x, [6], w, 1e-5)
    for mine, theirs in zip(outputs(made), torch.autograd.grad(forward, [x, w], g.detach()), strict=True):
        torch.testing.assert_close(mine, theirs)
    for domain in ("native", "exact"):
        verdict = verify(lambda module: module, made, domain=domain)
        assert (verdict.status, verdict.notes) == ("passed", [])
