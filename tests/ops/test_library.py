"""The ops as torch sees them: every op runs by itself, and its fake kernel says exactly what its real kernel returns."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from tcverify.domains import FLOAT64
from tcverify.ops import TensorSpec, lookup, resolve
from tcverify.ops.collective import complete
from tcverify.ops.dialects.tensor_cast import ops as meanings
from tcverify.ops.dialects.tensor_cast.library import SCHEMAS, define_tensor_cast

Make = Callable[..., torch.Tensor]

GROUP = (0, [0])


def attention(make: Make) -> tuple[Any, ...]:
    return make(2, 4, 8), make(2, 4, 2, 2), make(2, 4, 2, 2), make(4, 4), None, None, None, None


def int8(numbers: torch.Tensor) -> torch.Tensor:
    return (40 * numbers.double()).clamp(-128, 127).to(torch.int8)


def uint8(numbers: torch.Tensor) -> torch.Tensor:
    return (60 * numbers.double().abs()).clamp(0, 255).to(torch.uint8)


def fp8(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.to(torch.float8_e4m3fn)


def powers(numbers: torch.Tensor) -> torch.Tensor:
    return (numbers.abs() + 0.01).to(torch.float8_e8m0fnu)


def static(make: Make) -> tuple[Any, ...]:
    """x by weights of int8, both with offsets."""
    offsets = make(5).to(torch.int32), torch.tensor([[1], [0], [2]], dtype=torch.int32)
    return (
        int8(make(3, 4)), int8(make(4, 5)), make(5), offsets[0], make(3, 1), offsets[1], make(5), torch.bfloat16,
    )  # fmt: skip


def weights_only(make: Make) -> tuple[Any, ...]:
    """x as it is by weights of int4."""
    return make(3, 4), int8(make(2, 5)), make(1), None, None, None, None, None


def eight_bits(make: Make) -> tuple[Any, ...]:
    return fp8(make(3, 4)), fp8(make(4, 5)), make(3, 1), make(5), None, None


def four_bits(make: Make) -> tuple[Any, ...]:
    return uint8(make(3, 18)), uint8(make(18, 5)), powers(make(3, 2)), powers(make(5, 2)), make(5), torch.float32


#: The experts of three tokens, two each; the fourth of five has none.
CHOSEN = torch.tensor([[4, 0], [2, 1], [0, 4]])


#: Arguments of every op, for a group of one; `make(*shape)` makes a tensor.
ARGUMENTS: dict[str, Callable[[Make], tuple[Any, ...]]] = {
    "rms_norm": lambda make: (make(2, 4, 8), make(8), 1e-5),
    "add_rms_norm": lambda make: (make(2, 4, 8), make(2, 4, 8), make(8), 1e-5),
    "add_rms_norm2": lambda make: (make(4, 8), make(1, 4, 8), make(8), 1e-5),
    "layer_norm": lambda make: (make(2, 4, 8), make(8), None, 1e-5),
    "modulated_layer_norm": lambda make: (make(2, 4, 8), make(8), make(8), make(2, 1, 8), make(2, 1, 8), 1e-5),
    "silu": lambda make: (make(4, 8),),
    "gelu": lambda make: (make(4, 8), "tanh"),
    "swiglu": lambda make: (make(4, 8), make(4, 8)),
    "gated_residual_add": lambda make: (make(4, 8), make(2, 4, 8), make(2, 1, 8)),
    "cat": lambda make: ([make(2, 4), make(2, 6)], -1),
    "attention": attention,
    "moe_gating_top_k_softmax": lambda make: (make(2, 3, 5), 2),
    "init_routing_v2": lambda make: (make(1, 3, 8), CHOSEN),
    "unpermute_tokens": lambda make: (make(6, 8), CHOSEN),
    "grouped_matmul": lambda make: ([make(2, 4), make(0, 4), make(3, 4)], [make(4, 5)] * 3, [make(5), None, None]),
    "routed_matmul": lambda make: (make(6, 4), make(5, 4, 3), make(5, 3), CHOSEN),
    "all_reduce": lambda make: (make(4, 8), *GROUP),
    "reduce_scatter": lambda make: (make(4, 8), 1, *GROUP),
    "all_gather": lambda make: (make(4, 8), 1, *GROUP),
    "all_to_all": lambda make: (make(4, 8), [4], [4], *GROUP),
    "pipeline_send_recv": lambda make: (make(4, 8), 0, 0, 0, 1),
    "matmul_all_reduce": lambda make: (make(2, 3, 4), make(4, 5), make(5), *GROUP),
    "static_quant_linear": static,
    "static_quant_linear_int4": weights_only,
    "fp8_linear": eight_bits,
    "mxfp4_linear": four_bits,
    "static_quant_linear_all_reduce": lambda make: (*static(make), *GROUP),
    "static_quant_linear_int4_all_reduce": lambda make: (*weights_only(make), *GROUP),
    "fp8_linear_all_reduce": lambda make: (*eight_bits(make), *GROUP),
    "mxfp4_linear_all_reduce": lambda make: (*four_bits(make), *GROUP),
    "_internal_mark_region_begin": lambda make: (make(4, 8), 7),
    "_internal_mark_region_end": lambda make: (make(4, 8), 7),
    "_internal_copy_region": lambda make: (make(4, 8), 7),
    "_internal_order_barrier": lambda make: (make(4, 8), make(2)),
    "_internal_wait_and_bind": lambda make: (make(4, 8), 1, [make(2)]),
    "_internal_record": lambda make: (make(4, 8), 1),
}


def contiguous(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def transposed(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Dense, with the dims in memory the other way round."""
    return contiguous(*reversed(shape), dtype=dtype).permute(*range(len(shape))[::-1])


def gapped(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Every second element along the last dim of a larger tensor, from the second one on."""
    return contiguous(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., 1::2]


def broadcast(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """One row, seen again and again."""
    return contiguous(*[1] * (len(shape) - 1), shape[-1], dtype=dtype).expand(shape)


def halved(*shape: int) -> torch.Tensor:
    return contiguous(*shape, dtype=torch.bfloat16)


LAYOUTS: list[Make] = [contiguous, transposed, gapped, broadcast, halved]


def specs(value: Any) -> Any:
    """Shape, stride and dtype of every tensor of a result."""
    return pytree.tree_map_only(torch.Tensor, lambda t: TensorSpec.of(t).layout, value)


def faked(target: Any, arguments: tuple[Any, ...]) -> Any:
    mode = FakeTensorMode()
    with mode:
        return target(*pytree.tree_map_only(torch.Tensor, mode.from_tensor, arguments))


def test_the_samples_cover_every_op() -> None:
    assert ARGUMENTS.keys() == SCHEMAS.keys()


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_fake_kernel_says_what_the_real_one_returns(name: str, layout: Make) -> None:
    target, arguments = resolve(f"tensor_cast::{name}"), ARGUMENTS[name](layout)
    assert specs(faked(target, arguments)) == specs(target(*arguments))


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_an_op_means_has_the_layout_of_its_kernel(name: str, layout: Make) -> None:
    target, arguments = resolve(f"tensor_cast::{name}"), ARGUMENTS[name](layout)
    carried = tuple(map(FLOAT64.literal, FLOAT64.carry(arguments)))
    op = lookup(target)
    if not op.collective:
        result = op.require()(*carried)
    else:
        steps, answer = op.require()(0, *carried), None
        try:
            while True:
                request = next(steps) if answer is None else steps.send(answer)
                (answer,) = complete([request.collective], [request.tensor])
        except StopIteration as stop:
            result = stop.value
    assert specs(result) == specs(FLOAT64.carry(target(*arguments)))


@pytest.mark.parametrize("name", SCHEMAS)
def test_torch_accepts_the_op(name: str) -> None:
    target, arguments = resolve(f"tensor_cast::{name}"), ARGUMENTS[name](contiguous)
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    narrow = [t for t in arguments if isinstance(t, torch.Tensor) and t.is_floating_point() and t.itemsize == 1]
    torch.library.opcheck(target, arguments, test_utils=checks[1:] if narrow else checks)  # the first compares: not fp8


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_kernel_computes_what_the_op_means(name: str) -> None:
    op = lookup(resolve(f"tensor_cast::{name}"))
    arguments = tuple(map(FLOAT64.literal, FLOAT64.carry(ARGUMENTS[name](contiguous))))
    direct = resolve(op.name)(*arguments)
    if op.collective:  # on a group of one every collective is the identity
        expected = arguments[0]
        if name == "matmul_all_reduce":
            expected = arguments[0] @ arguments[1] + arguments[2]
        elif name.endswith("linear_all_reduce") or "int4" in name:
            expected = lookup(resolve(op.name.removesuffix("_all_reduce"))).require()(*arguments[:-2])
        assert torch.equal(direct, expected)
    else:
        torch.testing.assert_close(direct, op.require()(*arguments), rtol=0, atol=0)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_result_is_not_its_argument(name: str) -> None:
    arguments = ARGUMENTS[name](contiguous)
    results = pytree.tree_leaves(resolve(f"tensor_cast::{name}")(*arguments))
    taken = {t.untyped_storage().data_ptr() for t in pytree.tree_leaves(arguments) if isinstance(t, torch.Tensor)}
    assert taken.isdisjoint({t.untyped_storage().data_ptr() for t in results})


@pytest.mark.parametrize(
    ("name", "more", "dtype"),
    [
        ("rms_norm", (contiguous(8), 1e-5), torch.bfloat16),
        ("add_rms_norm", (contiguous(4, 8), contiguous(8), 1e-5), torch.bfloat16),
        ("gated_residual_add", (contiguous(4, 8), contiguous(8)), torch.float32),
    ],
)
def test_results_have_the_dtype_of_the_first_argument_or_the_promoted_one(
    name: str, more: tuple[Any, ...], dtype: torch.dtype
) -> None:
    target, arguments = resolve(f"tensor_cast::{name}"), (halved(4, 8), *more)
    assert target(*arguments).dtype is dtype
    assert specs(faked(target, arguments)) == specs(target(*arguments))


def test_two_results_have_two_storages() -> None:
    norm, total = torch.ops.tensor_cast.add_rms_norm2(contiguous(4, 8), contiguous(4, 8), contiguous(8), 1e-5)
    assert norm.data_ptr() != total.data_ptr()


def test_fake_reduce_scatter_refuses_what_the_real_one_refuses() -> None:
    target = resolve("tensor_cast::reduce_scatter")
    with pytest.raises(ValueError, match="cannot divide size 3 of dim 0 by 2 ranks"):
        faked(target, (contiguous(3, 2), 0, 0, [0, 1]))


def test_fake_gather_and_scatter_scale_the_dim_by_the_group() -> None:
    gather, scatter = resolve("tensor_cast::all_gather"), resolve("tensor_cast::reduce_scatter")
    assert faked(gather, (contiguous(4, 6), 1, 1, [1, 0])).shape == (4, 12)
    assert faked(scatter, (contiguous(4, 6), -1, 1, [1, 0])).shape == (4, 3)


def test_fake_all_to_all_has_the_rows_that_it_receives() -> None:
    target = resolve("tensor_cast::all_to_all")
    assert faked(target, (contiguous(4, 6), [5, 2], [1, 3], 1, [1, 0])).shape == (7, 6)


def test_a_packed_attention_has_a_shape_though_no_meaning() -> None:
    arguments = [*attention(contiguous)]
    arguments[6] = torch.tensor([2, 2])
    assert faked(resolve("tensor_cast::attention"), tuple(arguments)).shape == (2, 4, 8)


def test_defining_the_ops_again_changes_nothing() -> None:
    before = [resolve(f"tensor_cast::{name}") for name in SCHEMAS]
    define_tensor_cast()
    assert [resolve(f"tensor_cast::{name}") for name in SCHEMAS] == before


def test_every_defined_op_has_a_meaning() -> None:
    for name in SCHEMAS:
        assert lookup(resolve(f"tensor_cast::{name}")).run is not None


def test_a_paged_attention_is_the_same_function_in_the_kernel() -> None:
    arguments = [*attention(contiguous)]
    arguments[4] = torch.zeros(1, dtype=torch.int64)
    expected = meanings.attention(*arguments).to(arguments[0].dtype)
    assert torch.equal(torch.ops.tensor_cast.attention(*arguments), expected)


def test_a_collective_of_two_ranks_needs_a_process_group() -> None:
    with pytest.raises(Exception, match=r"torch\.distributed is not initialised"):
        torch.ops.tensor_cast.all_reduce(contiguous(2, 2), 0, [0, 1])
