"""The quantised linears against plain Python: element by element, from the formats' definitions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tcverify.domains import Exact
from tcverify.errors import UnsupportedOp
from tcverify.execution import Lockstep, ProcessGroupPool
from tcverify.ops import ShapeError, TensorSpec, infer, lookup, resolve
from tcverify.ops.dialects.tensor_cast.quantised import FUSED, LOCAL, doubled_e2m1, halves, signed_int4
from tcverify.program import GraphBuilder, InputSpec, Mesh, Program, Recipe, dumps, loads, shard, spmd_program
from tests.ops.test_tensor_cast_collectives import on_group

Rows = list[list[float]]

#: The sixteen E2M1 codes, as the OCP specification lists them.
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]

GENERATOR = torch.Generator()


def integers(low: int, high: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=GENERATOR.manual_seed(seed), dtype=torch.int64).to(dtype)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR.manual_seed(seed), dtype=torch.float64).to(dtype)


def product(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]], bias: Sequence[float] = ()) -> Rows:
    columns = range(len(right[0]))
    return [
        [sum(row[k] * right[k][n] for k in range(len(row))) + (bias[n] if bias else 0) for n in columns] for row in left
    ]


def agrees(actual: torch.Tensor, expected: Rows, dtype: torch.dtype = torch.float32) -> None:
    assert actual.dtype is dtype
    assert actual.is_contiguous()
    precise = torch.tensor(expected, dtype=torch.float64)
    rtol = 1e-5 if dtype is torch.float32 else float(torch.finfo(dtype).eps)
    torch.testing.assert_close(actual.to(torch.float64), precise, rtol=rtol, atol=1e-5)


def run(name: str, *arguments: Any) -> torch.Tensor:
    result = lookup(resolve(f"tensor_cast::{name}")).require()(*arguments)
    assert isinstance(result, torch.Tensor)
    return result


# ---------------------------------------------------------------------------------------------------------- the formats


def test_all_codes_of_e2m1() -> None:
    assert (doubled_e2m1(torch.arange(16)) * 0.5).tolist() == E2M1


def test_all_codes_of_int4() -> None:
    assert signed_int4(torch.arange(16)).tolist() == [*range(8), *range(-8, 0)]


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_the_low_half_of_a_byte_comes_first(dtype: torch.dtype) -> None:
    packed = torch.tensor([[0x21, 0x43], [0x65, 0xF8 - 256 if dtype is torch.int8 else 0xF8]], dtype=dtype)
    assert halves(packed, -1).tolist() == [[1, 2, 3, 4], [5, 6, 8, 15]]
    assert halves(packed, 0).tolist() == [[1, 3], [2, 4], [5, 8], [6, 15]]


# ----------------------------------------------------------------------------------------------------------- local ops


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("whole", [True, False])
def test_int8_by_int8(whole: bool, out: torch.dtype) -> None:
    x, w = integers(-128, 128, (3, 6), torch.int8), integers(-128, 128, (6, 4), torch.int8, 1)
    x_scale, w_scale = (
        (numbers(1).abs(), numbers(1).abs()) if whole else (numbers(3, 1).abs(), numbers(4, seed=1).abs())
    )
    x_offset, w_offset, bias = integers(-9, 9, (3, 1), torch.int32), integers(-9, 9, (4,), torch.int32), numbers(4)

    def at(values: torch.Tensor, i: int) -> float:
        return float(values.flatten()[i if values.numel() > 1 else 0])

    left = [[(int(x[m, k]) - at(x_offset, m)) * at(x_scale, m) * 0.01 for k in range(6)] for m in range(3)]
    right = [[(int(w[k, n]) - at(w_offset, n)) * at(w_scale, n) for n in range(4)] for k in range(6)]
    actual = run("static_quant_linear", x, w, w_scale, w_offset, x_scale * 0.01, x_offset, bias, out)
    expected = torch.tensor(product(left, right, bias.tolist()))
    torch.testing.assert_close(actual.float(), expected, rtol=2 * float(torch.finfo(out).eps), atol=1e-3)
    assert actual.dtype is out


def test_an_x_that_is_not_quantised_is_used_as_it_is() -> None:
    x, w, w_scale = numbers(3, 6, dtype=torch.bfloat16), integers(-128, 128, (6, 4), torch.int8), numbers(4).abs()
    right = [[int(w[k, n]) * float(w_scale[n]) for n in range(4)] for k in range(6)]
    actual = run("static_quant_linear", x, w, w_scale, None, None, None, None, None)
    torch.testing.assert_close(actual.float(), torch.tensor(product(x.tolist(), right)), rtol=2**-7, atol=1e-3)
    assert actual.dtype is torch.bfloat16  # that of x
    agrees(run("static_quant_linear", x, w, w_scale, None, None, None, None, torch.float32), product(x.tolist(), right))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_int4_weights_are_packed_along_the_rows(dtype: torch.dtype) -> None:
    values = integers(-8, 8, (6, 4), torch.int64)
    codes = values & 15
    packed = (codes[0::2] | codes[1::2] << 4).to(torch.uint8).view(dtype)
    x, w_scale, w_offset = numbers(3, 6), numbers(4).abs(), integers(-3, 3, (1,), torch.int32)
    offset = int(w_offset[0])
    right = [[(int(values[k, n]) - offset) * float(w_scale[n]) for n in range(4)] for k in range(6)]
    arguments = x, packed, w_scale, w_offset, None, None, None, None
    agrees(run("static_quant_linear_int4", *arguments), product(x.tolist(), right))


def test_fp8_by_fp8() -> None:
    x, w = numbers(3, 6).to(torch.float8_e4m3fn), numbers(6, 4, seed=1).to(torch.float8_e4m3fn)
    x_scale, w_scale, bias = numbers(3, 1).abs(), numbers(4).abs(), numbers(4)
    left = [[float(x[m, k]) * float(x_scale[m, 0]) for k in range(6)] for m in range(3)]
    right = [[float(w[k, n]) * float(w_scale[n]) for n in range(4)] for k in range(6)]
    arguments = x, w, x_scale, w_scale
    agrees(run("fp8_linear", *arguments, bias, torch.float32), product(left, right, bias.tolist()))
    assert run("fp8_linear", *arguments, None, None).dtype is torch.float16


@pytest.mark.parametrize("inner", [4, 32, 34, 96])
def test_mxfp4_scales_blocks_of_32(inner: int) -> None:
    x, w = integers(0, 256, (3, inner // 2), torch.uint8), integers(0, 256, (inner // 2, 4), torch.uint8, 1)
    blocks = -(-inner // 32)
    exponents = integers(-3, 4, (3, blocks), torch.int64), integers(-3, 4, (4, blocks), torch.int64, 1)
    scales = [(2.0 ** e.to(torch.float64)).to(torch.float8_e8m0fnu) for e in exponents]

    def half(byte: int, k: int) -> float:
        return E2M1[byte >> 4 if k % 2 else byte & 15]

    left = [[half(int(x[m, k // 2]), k) * 2.0 ** int(exponents[0][m, k // 32]) for k in range(inner)] for m in range(3)]
    right = [
        [half(int(w[k // 2, n]), k) * 2.0 ** int(exponents[1][n, k // 32]) for n in range(4)] for k in range(inner)
    ]
    agrees(run("mxfp4_linear", x, w, *scales, None, torch.float32), product(left, right))
    assert run("mxfp4_linear", x, w, *scales, None, None).dtype is torch.float16


# ------------------------------------------------------------------------------------------------------ what is refused


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec.contiguous(shape, dtype)


S8, U8, F8, E8 = torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("static_quant_linear", (spec(3, 6), spec(5, 4, dtype=S8), spec(4)), "cannot multiply"),
        ("static_quant_linear", (spec(2, 3, 6), spec(6, 4, dtype=S8), spec(4)), "cannot multiply"),
        ("static_quant_linear", (spec(3, 6), spec(6, 4), spec(4)), "dtype int8 or uint8"),
        ("static_quant_linear", (spec(3, 6), spec(6, 4, dtype=S8), spec(3)), "w_scale"),
        ("static_quant_linear", (spec(3, 6), spec(6, 4, dtype=S8), spec(1, 1, 1)), "w_scale"),
        ("static_quant_linear", (spec(3, 6), spec(6, 4, dtype=S8), spec(4), spec(2)), "w_offset"),
        ("static_quant_linear", (spec(3, 6), spec(6, 4, dtype=S8), spec(4), None, spec(3)), "x_scale"),
        ("static_quant_linear", (spec(3, 6), spec(6, 4, dtype=S8), spec(4), None, None, None, spec(1)), "bias"),
        ("static_quant_linear_int4", (spec(3, 6), spec(6, 4, dtype=S8), spec(4)), "cannot multiply"),
    ],
)
def test_operands_that_do_not_fit(name: str, arguments: tuple[Any, ...], why: str) -> None:
    arguments = (*arguments, *[None] * (8 - len(arguments)))
    with pytest.raises(ShapeError, match=why):
        infer(resolve(f"tensor_cast::{name}"), arguments, {}, iter(range(9)).__next__)
    with pytest.raises(ShapeError, match=why):
        infer(resolve(f"tensor_cast::{name}_all_reduce"), (*arguments, 0, [0]), {}, iter(range(9)).__next__)


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("fp8_linear", (spec(3, 6, dtype=F8), spec(6, 4, dtype=S8), spec(1), spec(4)), "8-bit floating dtype"),
        ("fp8_linear", (spec(3, 6, dtype=F8), spec(6, 4, dtype=F8), spec(3), spec(4)), "x_scale"),
        ("mxfp4_linear", (spec(3, 17, dtype=U8), spec(17, 4, dtype=U8), spec(3, 1), spec(4, 2)), "x_scale"),
        ("mxfp4_linear", (spec(3, 17, dtype=U8), spec(17, 4, dtype=U8), spec(3, 2), spec(2, 4)), "w_scale"),
    ],
)
def test_scales_that_do_not_fit(name: str, arguments: tuple[Any, ...], why: str) -> None:
    with pytest.raises(ShapeError, match=why):
        infer(resolve(f"tensor_cast::{name}"), (*arguments, None, None), {}, iter(range(9)).__next__)


def test_what_has_no_meaning() -> None:
    whole = spec(3, 6, dtype=S8), spec(6, 4, dtype=S8), spec(4), None, spec(1), None, None, None
    with pytest.raises(UnsupportedOp, match="give an out_dtype"):
        infer(resolve("tensor_cast::static_quant_linear"), whole, {}, iter(range(9)).__next__)
    wide = spec(3, 6, dtype=S8), spec(6, 4, dtype=S8), spec(3, 1), spec(4, 1), None, None
    with pytest.raises(UnsupportedOp, match="bytes"):
        infer(resolve("tensor_cast::mxfp4_linear"), wide, {}, iter(range(9)).__next__)


# ------------------------------------------------------------------------------------------------- on ranks, and summed

PAIR = Mesh.grid({"tp": 2})
BYTES = Recipe("integers", 256)
ROWS, COLUMNS = (("tp", shard(0)),), (("tp", shard(1)),)
INPUTS: dict[str, list[InputSpec]] = {
    "static_quant_linear": [
        InputSpec("x", (3, 8), torch.bfloat16, COLUMNS),
        InputSpec("w", (8, 4), S8, ROWS, Recipe("integers", 128)),
        InputSpec("w_scale", (4,), recipe=Recipe("norm_weight", 0.01)),
        InputSpec("w_offset", (4,), torch.int32, recipe=Recipe("constant", 64)),
    ],
    "static_quant_linear_int4": [
        InputSpec("x", (3, 8), torch.bfloat16, COLUMNS),
        InputSpec("w", (4, 4), U8, ROWS, BYTES),
        InputSpec("w_scale", (4,), recipe=Recipe("norm_weight", 0.1)),
    ],
    "fp8_linear": [
        InputSpec("x", (3, 8), F8, COLUMNS),
        InputSpec("w", (8, 4), F8, ROWS),
        InputSpec("x_scale", (3, 1), recipe=Recipe("norm_weight")),
        InputSpec("w_scale", (4,), recipe=Recipe("norm_weight")),
    ],
    "mxfp4_linear": [
        InputSpec("x", (3, 4), U8, COLUMNS, BYTES),
        InputSpec("w", (4, 4), U8, ROWS, BYTES),
        InputSpec("x_scale", (3, 2), E8, COLUMNS, Recipe("norm_weight")),
        InputSpec("w_scale", (4, 2), E8, COLUMNS, Recipe("norm_weight")),
    ],
}


def program(name: str, fused: bool) -> Program:
    """A row-parallel linear and its sum, as one op or as two."""
    specs = INPUTS[name]
    optional = 7 if name.startswith("static") else 5

    def build(b: GraphBuilder) -> Any:
        operands = [b.input(s.name) for s in specs]
        operands += [None] * (optional - len(operands))
        if fused:
            return b.call(f"tensor_cast::{name}_all_reduce", *operands, torch.bfloat16, b.rank, b.group("tp"))
        addend = b.call(f"tensor_cast::{name}", *operands, torch.bfloat16)
        return b.call("tensor_cast::all_reduce", addend, b.rank, b.group("tp"))

    return spmd_program(PAIR, specs, build)


def outputs(made: Any) -> list[torch.Tensor]:
    assert made.finished, made.error
    return [result.outputs[0] for result in made.ranks]


@pytest.mark.parametrize("name", LOCAL)
def test_the_fused_op_is_the_linear_and_its_sum(name: str) -> None:
    whole, apart = (outputs(Lockstep().run(program(name, fused))) for fused in (True, False))
    for a, b in zip(whole, apart, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(whole[0], torch.zeros_like(whole[0]))


@pytest.mark.parametrize("name", LOCAL)
def test_row_parallel_linears_add_up_to_the_whole(name: str) -> None:
    specs = INPUTS[name]
    whole = [InputSpec(s.name, s.shape, s.dtype, (), s.recipe).values(PAIR, 0, 0) for s in specs]
    if name == "mxfp4_linear":  # a block of a rank is half a block of the whole: give its elements their rank's scale
        for position, axis in ((0, 1), (1, 0)):
            parts = whole[position].chunk(2, axis)
            for rank, part in enumerate(parts):
                assert torch.equal(part, specs[position].values(PAIR, rank, 0))
        wide = torch.zeros(3, 4)
        for rank in range(2):
            wide += run(name, *[s.values(PAIR, rank, 0) for s in specs], None, torch.float32)
    else:
        optional = 7 if name.startswith("static") else 5
        wide = run(name, *whole, *[None] * (optional - len(whole)), torch.float32)
    for out in outputs(Lockstep().run(program(name, True))):
        torch.testing.assert_close(out.float(), wide, rtol=1e-5, atol=1e-5)


def test_the_ranks_processes_compute_what_lockstep_computes(pool: Callable[[int], ProcessGroupPool]) -> None:
    for name in LOCAL:
        made = loads(dumps(program(name, True)))  # through a file as well
        there = pool(2).run(made)
        for a, b in zip(outputs(Lockstep().run(made)), outputs(there), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)


def test_the_sum_is_of_what_was_cast() -> None:
    x, w = [numbers(2, 4, seed=r) for r in range(3)], [integers(-128, 128, (4, 3), S8, r) for r in range(3)]
    group = [4, 1, 3]
    arguments = x, w, [torch.ones(1)] * 3, *[[None] * 3] * 4, [torch.bfloat16] * 3, group, [group] * 3
    op = lookup(resolve("tensor_cast::static_quant_linear_all_reduce"))
    addends = [(a @ b.float()).bfloat16() for a, b in zip(x, w, strict=True)]
    for result in on_group(op.require(), group, *arguments):
        assert result.dtype is torch.bfloat16
        torch.testing.assert_close(result, sum(addends), rtol=2**-6, atol=1)


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_op_may_name_its_arguments_in_any_order(name: str) -> None:
    specs = INPUTS[name.removesuffix("_all_reduce")]
    op = lookup(resolve(f"tensor_cast::{name}"))
    given = {s.name: s.values(PAIR, 0, 0) for s in specs}
    names = [a.name for a in resolve(f"tensor_cast::{name}")._schema.arguments]
    rest = dict.fromkeys(n for n in names if n not in given) | {
        "out_dtype": torch.float32,
        "rank": 0,
        "rank_group": [0],
    }
    first, *others = itertools.islice(itertools.cycle(names), 1, len(names) + 1)
    kwargs = {n: (given | rest)[n] for n in [first, *others]}
    (request,) = [next(op.require()(0, **kwargs))]
    positional = [(given | rest)[n] for n in names]
    (same,) = [next(op.require()(0, *positional))]
    assert torch.equal(request.tensor, same.tensor)
    assert op.resources == ("compute", "comm")


@pytest.mark.parametrize("name", LOCAL)
def test_the_exact_domain_knows_them(name: str) -> None:
    fused, apart = (Lockstep().run(program(name, one), domain=Exact(0)) for one in (True, False))
    for a, b in zip(outputs(fused), outputs(apart), strict=True):
        assert a.dtype is torch.float64
        assert torch.equal(a, b)
        assert int(a.abs().max()) > 1000  # residues, not numbers
