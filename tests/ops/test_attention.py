"""Attention ops of every kernel: values of torch's own attention and autograd, layouts of torch's own shape functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tcverify import verify
from tcverify.domains import NATIVE, Exact
from tcverify.errors import UnsupportedOp
from tcverify.execution import Lockstep
from tcverify.ops import TensorSpec, infer, lookup, resolve
from tcverify.ops.dialects.aten_attention import ATTENTION, attend, attend_backward
from tcverify.passes.identity import Identity
from tcverify.program import GraphBuilder, InputSpec, Mesh, Program, dumps, loads, spmd_program

KERNELS = (
    "flash_attention",
    "efficient_attention",
    "cudnn_attention",
    "flash_attention_for_cpu",
    "fused_attention_overrideable",
)
B, H, S, D = 2, 4, 6, 8


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def operands(heads: int = H, keys: int = S) -> list[torch.Tensor]:
    made = [draw(B, H, S, D, seed=1), draw(B, heads, keys, D, seed=2), draw(B, heads, keys, D, seed=3)]
    return [x.requires_grad_() for x in made]


def forward_arguments(kernel: str, bias: torch.Tensor | None, causal: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments behind q, k and v."""
    if kernel == "flash_attention_for_cpu":
        return (0.0, causal), {"attn_mask": bias}
    if kernel == "flash_attention":
        return (0.0, causal, False), {}
    if kernel == "fused_attention_overrideable":
        return (bias, 0.0, causal, False), {}
    return (bias, True, 0.0, causal), {}


def run(name: str, *args: Any, **kwargs: Any) -> Any:
    target = resolve(f"aten::_scaled_dot_product_{name}")
    with torch.no_grad():
        return lookup(target).require()(*args, **kwargs)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", ["plain", "causal", "bias", "shared heads", "other length"])
def test_forward_and_backward_are_those_of_autograd(kernel: str, case: str) -> None:
    if case == "bias" and kernel == "flash_attention":
        pytest.skip("this kernel takes no bias")
    if case == "shared heads" and kernel == "efficient_attention":
        pytest.skip("this kernel has keys for every head")
    q, k, v = operands(heads=2 if case == "shared heads" else H, keys=S + 2 if case == "other length" else S)
    bias = draw(B, 1, S, S, seed=9).requires_grad_() if case == "bias" else None
    causal = case == "causal"
    expected = F.scaled_dot_product_attention(q, k, v, bias, is_causal=causal, enable_gqa=case == "shared heads")
    more, named = forward_arguments(kernel, bias, causal)
    out, lse, *rest = run(kernel, q, k, v, *more, **named)
    close(out, expected.detach())
    logits = q @ k.repeat_interleave(H // k.shape[1], 1).transpose(-2, -1) / D**0.5 + (0 if bias is None else bias)
    if causal:
        logits = logits.masked_fill(torch.ones(S, S).triu(1).bool(), -torch.inf)
    close(lse.reshape(B, H, -1)[..., :S], logits.logsumexp(-1).detach())

    grad = draw(B, H, S, D, seed=5)
    wanted = [q, k, v] if bias is None else [q, k, v, bias]
    gradients = torch.autograd.grad(expected, wanted, grad)
    none = torch.zeros(0)
    if kernel == "flash_attention_for_cpu":
        found = run(f"{kernel}_backward", grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias)
    elif kernel == "efficient_attention":
        mask = [True, True, True, bias is not None]
        found = run(f"{kernel}_backward", grad, q, k, v, bias, out, lse, *rest, 0.0, mask, causal)
    elif kernel == "cudnn_attention":
        seeds = rest[4:6]
        given = none if bias is None else bias
        found = run(f"{kernel}_backward", grad, q, k, v, out, lse, *seeds, given, none, none, S, S, 0.0, causal)
    elif kernel == "flash_attention":
        found = run(f"{kernel}_backward", grad, q, k, v, out, lse, none, none, S, S, 0.0, causal, *rest[4:6])
    else:
        mask, given = [True, True, True, bias is not None], none if bias is None else bias
        found = run(
            f"{kernel}_backward", grad, q, k, v, given, mask, out, lse, none, none, S, S, 0.0, causal, *rest[4:6]
        )
    for mine, theirs in zip(found, gradients[:3], strict=False):
        close(mine, theirs)
    if bias is not None and len(found) > 3 and found[3] is not None and found[3].numel():
        close(found[3], gradients[3])


@pytest.mark.parametrize("kernel", KERNELS)
def test_results_lie_as_torch_says(kernel: str) -> None:
    q, k, v = (x.detach().float() for x in operands())
    more, named = forward_arguments(kernel, None, True)
    target = resolve(f"aten::_scaled_dot_product_{kernel}")
    meta = target(*(x.to("meta") for x in (q, k, v)), *more, **named)
    for theirs, mine in zip(meta, run(kernel, q, k, v, *more, **named), strict=True):
        if isinstance(theirs, torch.Tensor):
            assert (mine.shape, mine.stride()) == (theirs.shape, theirs.stride())
        else:
            assert mine == theirs
    specs = [TensorSpec.contiguous((B, H, S, D), torch.float32)] * 3
    inferred = infer(target, (*specs, *more), named, iter(range(100)).__next__)
    assert [s.shape for s in inferred if isinstance(s, TensorSpec)] == [
        tuple(t.shape) for t in meta if isinstance(t, torch.Tensor)
    ]


def test_the_kernel_that_a_cpu_has_agrees() -> None:
    q, k, v = (x.detach() for x in operands())
    target = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    for mine, theirs in zip(
        run("flash_attention_for_cpu", q, k, v, 0.0, True), target(q, k, v, 0.0, True), strict=True
    ):
        close(mine, theirs.to(mine.dtype))
    native = lookup(target).native
    assert native is not None
    assert torch.equal(native(q, k, v, 0.0, True)[0], target(q, k, v, 0.0, True)[0])


def test_in_the_dtypes_of_the_program_it_computes_in_float32_and_rounds() -> None:
    q, k, v = (x.detach().bfloat16() for x in operands())
    native = lookup(resolve("aten::_scaled_dot_product_flash_attention")).native
    assert native is not None
    out, lse = native(q, k, v)[:2]
    exact, _ = attend(q.double(), k.double(), v.double())
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(out, attend(q.float(), k.float(), v.float())[0].bfloat16())
    assert (out.double() - exact).abs().max() <= exact.abs().max() * 2**-8


def test_a_row_without_any_key_gives_zero() -> None:
    q, k, v = (x.detach() for x in operands())
    out, lse = attend(q, k, v, torch.zeros(S, S, dtype=torch.bool))
    assert torch.equal(out, torch.zeros_like(out))
    assert bool(lse.isfinite().all())


def test_the_backward_of_a_share_of_the_keys_adds_up_to_the_whole() -> None:
    """Ring attention: out and lse are of all keys."""
    q, k, v = (x.detach() for x in operands())
    grad = draw(B, H, S, D, seed=5)
    out, lse = attend(q, k, v)
    whole = attend_backward(grad, q, k, v, out, lse)
    parts = [attend_backward(grad, q, k[:, :, part], v[:, :, part], out, lse) for part in (slice(0, 2), slice(2, S))]
    close(parts[0][0] + parts[1][0], whole[0])
    close(torch.cat([parts[0][1], parts[1][1]], 2), whole[1])
    close(torch.cat([parts[0][2], parts[1][2]], 2), whole[2])


@pytest.mark.parametrize(
    ("name", "more", "reason"),
    [
        ("flash_attention", (0.1,), r"its result is random \(dropout_p=0.1\)"),
        ("efficient_attention", (None, True, 0.5), "random"),
        ("flash_attention", (0.0, True), "kernels disagree on the corner"),
        ("cudnn_attention", (None, True, 0.0, True), "kernels disagree on the corner"),
    ],
)
def test_what_has_no_one_meaning_is_refused(name: str, more: tuple[Any, ...], reason: str) -> None:
    q, k, v = (x.detach() for x in operands(keys=S + 1))
    with pytest.raises(UnsupportedOp, match=reason):
        run(name, q, k, v, *more)


def test_a_mask_that_starts_at_the_first_key_may_be_of_any_shape() -> None:
    q, k, v = (x.detach() for x in operands(keys=S + 3))
    close(
        run("efficient_attention", q, k, v, None, True, 0.0, True)[0],
        F.scaled_dot_product_attention(q, k, v, is_causal=True),
    )


def test_every_kernel_of_torch_is_known() -> None:
    known = {
        s.name.removeprefix("aten::") for s in torch._C._jit_get_all_schemas() if s.overload_name in ("", "default")
    }
    fused = {
        name for name in known if name.startswith("_scaled_dot_product") and "math" not in name and "mps" not in name
    }
    assert fused <= set(ATTENTION)


# ------------------------------------------------------------------------------------------------------------- programs


def program(kernel: str, **changed: Any) -> Program:
    def build(b: Any) -> Any:
        q, k, v = (b.input(name) for name in "qkv")
        more, named = forward_arguments(kernel, None, True)
        attended = b.call(f"aten::_scaled_dot_product_{kernel}", q, k, v, *more, **{**named, **changed})
        return b.call("aten::relu", b.getitem(attended, 0)), b.getitem(attended, 1)

    return spmd_program(Mesh.grid({"tp": 2}), [InputSpec(name, (B, H, S, D)) for name in "qkv"], build)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("domain", ["float64", "native", "exact"])
def test_programs_with_attention_are_verified_in_every_domain(kernel: str, domain: str) -> None:
    made = program(kernel)
    assert dumps(loads(dumps(made))) == dumps(made)
    verdict = verify(_larger_scale(1.0), made, domain=domain)
    assert (verdict.status, verdict.changed, verdict.notes) == ("passed", True, [])
    planted = verify(_larger_scale(1.0001), made, domain=domain)
    assert planted.status == "refuted"


def _larger_scale(factor: float) -> Callable[[torch.fx.GraphModule], torch.fx.GraphModule]:
    """Writes the scale that is meant out, times a factor."""

    def rewrite(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        node = next(n for n in module.graph.nodes if "scaled_dot" in n.name)
        node.kwargs = {**node.kwargs, "scale": factor / D**0.5}
        module.recompile()
        return module

    return rewrite


@pytest.mark.parametrize("kernel", ["flash_attention", "flash_attention_for_cpu"])
def test_the_field_sees_through_attention(kernel: str) -> None:
    """What the op computes is what its parts compute, residue by residue."""

    def parts(b: Any) -> Any:
        q, k, v = (b.input(name) for name in "qkv")
        turned = b.call("aten::transpose.int", k, 2, 3)
        flat = [
            b.call("aten::view", x, [B * H, *shape])
            for x, shape in (
                (q, (S, D)),
                (b.call("aten::clone", turned, memory_format=torch.contiguous_format), (D, S)),
                (v, (S, D)),
            )
        ]
        logits = b.call("aten::mul.Tensor", b.call("aten::bmm", flat[0], flat[1]), 1 / D**0.5)
        weights = b.call("aten::_softmax", logits, -1, False)
        return b.call("aten::view", b.call("aten::bmm", weights, flat[2]), [B, H, S, D])

    def whole(b: Any) -> Any:
        return b.getitem(
            b.call(f"aten::_scaled_dot_product_{kernel}", *(b.input(name) for name in "qkv"), 0.0, False), 0
        )

    inputs = [InputSpec(name, (B, H, S, D)) for name in "qkv"]
    runs = [
        Lockstep().run(spmd_program(Mesh.grid({"tp": 2}), inputs, build), domain=Exact(0)) for build in (parts, whole)
    ]
    assert torch.equal(runs[0].ranks[0].outputs[0], runs[1].ranks[0].outputs[0])
    assert Lockstep().run(spmd_program(Mesh.grid({"tp": 2}), inputs, whole), domain=NATIVE).finished


@pytest.mark.parametrize("shape", [(2, 0, 4, 2), (2, 2, 0, 2), (0, 2, 4, 2)], ids=["heads", "queries", "batch"])
@pytest.mark.parametrize("domain", ["float64", "exact", "native"])
def test_attention_of_nothing_ends_no_process(shape: tuple[int, ...], domain: str) -> None:
    def build(b: GraphBuilder) -> object:
        x = b.input("x")
        return b.getitem(b.call("aten::_scaled_dot_product_flash_attention_for_cpu", x, x, x), 0)

    program = spmd_program(Mesh.grid({"tp": 2}), [InputSpec("x", shape)], build)

    assert verify(Identity, program, domain=domain).status == "passed"
