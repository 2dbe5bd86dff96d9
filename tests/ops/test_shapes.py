"""Shape inference: equal to what torch's fake tensors say, with storage sharing made explicit."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from tcverify.errors import UnsupportedOp
from tcverify.ops import ShapeError, TensorSpec, fake_tensor, infer, new_fake_mode, resolve
from tcverify.ops.spec import contiguous_stride

F32, BF16, I64 = torch.float32, torch.bfloat16, torch.int64


def spec(*shape: int, dtype: torch.dtype = F32, alias: int | None = None) -> TensorSpec:
    return TensorSpec(shape, contiguous_stride(shape), dtype, 0, alias)


def counter(start: int = 100) -> Callable[[], int]:
    return itertools.count(start).__next__


def inferred(op: str, *args: Any, **kwargs: Any) -> Any:
    return infer(resolve(op), args, kwargs, counter())


def test_what_is_remembered_of_an_op_goes_by_keyword_arguments_too() -> None:
    for keepdim in (True, False, True):
        found = inferred("aten::sum.dim_IntList", spec(2, 3), [1], keepdim=keepdim)
        assert found.shape == ((2, 1) if keepdim else (2,))


# --------------------------------------------------------------------------------------- equal to torch's own fakes

TRANSPOSED = TensorSpec((4, 6), (1, 4), F32)
EXPANDED = TensorSpec((4, 6), (0, 1), F32)
SHIFTED = TensorSpec((2, 3), (6, 1), F32, offset=7)

CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("aten::add.Tensor", (spec(2, 3), spec(3, dtype=BF16)), {"alpha": 2}),
    ("aten::add.Tensor", (TRANSPOSED, TRANSPOSED), {}),
    ("aten::add.Tensor", (TRANSPOSED, spec(4, 6)), {}),
    ("aten::mul.Tensor", (EXPANDED, spec(4, 1)), {}),
    ("aten::mm.default", (spec(4, 6), spec(6, 5)), {}),
    ("aten::bmm.default", (spec(2, 4, 6), spec(2, 6, 5)), {}),
    ("aten::sum.dim_IntList", (TRANSPOSED, [1], True), {}),
    ("aten::mean.dim", (spec(2, 3, 4, dtype=BF16), [-1]), {}),
    ("aten::cat.default", ([spec(2, 3), spec(4, 3)],), {}),
    ("aten::view.default", (spec(4, 6), [2, -1]), {}),
    ("aten::view.default", (SHIFTED, [2, 1, 3]), {}),
    ("aten::permute.default", (spec(2, 3, 4), [2, 0, 1]), {}),
    ("aten::slice.Tensor", (spec(8, 4), 0, 2, 7, 2), {}),
    ("aten::split.Tensor", (spec(8, 4), 3), {}),
    ("aten::clone.default", (EXPANDED,), {}),
    ("aten::clone.default", (TRANSPOSED,), {"memory_format": torch.contiguous_format}),
    ("aten::_to_copy.default", (spec(2, 3),), {"dtype": BF16}),
    ("aten::eq.Scalar", (spec(2, 3), 1.0), {}),
    ("aten::max.dim", (spec(2, 3), 1), {}),
    ("aten::full.default", ([2, 3], 1.5), {"dtype": F32}),
    ("aten::layer_norm.default", (spec(2, 3), [3]), {}),
    ("aten::sum.default", (spec(2, 0),), {}),
    ("tensor_cast::rms_norm", (TRANSPOSED, spec(6), 1e-5), {}),
    ("tensor_cast::add_rms_norm2", (spec(4, 6, dtype=BF16), spec(1, 4, 6), spec(6), 1e-5), {}),
    ("tensor_cast::all_gather", (spec(4, 6), 1, 0, [0, 1, 2]), {}),
    ("tensor_cast::all_reduce", (TRANSPOSED, 0, [0, 1]), {}),
    ("python::add", (spec(2, 3), 1), {}),
    ("python::matmul", (spec(2, 3), spec(3, 4)), {}),
    ("python::getitem", (spec(2, 3), 1), {}),
]


def run_fake(op: str, args: Any, kwargs: Any) -> Any:
    """What torch says, on fake tensors of its own making."""
    mode = FakeTensorMode()

    def make(value: TensorSpec) -> torch.Tensor:
        extent = 1 + value.offset + sum((n - 1) * s for n, s in zip(value.shape, value.stride, strict=True))
        whole = torch.empty(max(extent, 0), dtype=value.dtype)
        return mode.from_tensor(whole).as_strided(value.shape, value.stride, value.offset)

    with mode:
        args, kwargs = pytree.tree_map_only(TensorSpec, make, (args, kwargs))
        return resolve(op)(*args, **kwargs)


@pytest.mark.parametrize(("op", "args", "kwargs"), CALLS, ids=[op for op, _, _ in CALLS])
def test_specs_are_those_of_a_fake_run(op: str, args: Any, kwargs: Any) -> None:
    expected = pytree.tree_map_only(torch.Tensor, TensorSpec.of, run_fake(op, args, kwargs))
    actual = pytree.tree_map_only(TensorSpec, unaliased, inferred(op, *args, **kwargs))
    assert actual == expected
    assert type(actual) is type(expected)


def unaliased(value: TensorSpec) -> TensorSpec:
    return TensorSpec(value.shape, value.stride, value.dtype, value.offset)


def test_constants_that_are_no_tensors_come_back_as_they_are() -> None:
    assert inferred("python::getitem", (spec(2), 5, None), 1) == 5
    assert inferred("python::add", 2, 3) == 5


def test_a_slice_may_be_a_constant() -> None:
    assert inferred("python::getitem", spec(4, 6), slice(1, 3)).shape == (2, 6)


# ------------------------------------------------------------------------------------------------------ aliasing


def test_a_view_has_the_storage_of_its_base() -> None:
    assert inferred("aten::view.default", spec(4, 6, alias=3), [24]).alias == 3


def test_a_slice_of_a_slice_keeps_its_offset() -> None:
    base = TensorSpec((4, 6), (6, 1), F32, 12, 3)
    part = inferred("aten::slice.Tensor", base, 0, 1, 3)
    assert part == TensorSpec((2, 6), (6, 1), F32, 18, 3)


def test_all_parts_of_a_split_share_one_storage() -> None:
    parts = inferred("aten::split.Tensor", spec(4, 6, alias=3), 2)
    assert [part.alias for part in parts] == [3, 3]


def test_an_in_place_op_returns_the_storage_that_it_mutates() -> None:
    assert inferred("aten::add_.Tensor", spec(4, alias=5), spec(4, alias=6)).alias == 5


def test_a_new_value_has_a_new_storage() -> None:
    assert inferred("aten::add.Tensor", spec(4, alias=5), spec(4, alias=6)).alias == 100


def test_two_new_values_have_two_new_storages() -> None:
    values, indices = inferred("aten::max.dim", spec(4, 2, alias=5), 1)
    assert (values.alias, indices.alias) == (100, 101)


def test_a_reshape_that_copies_has_a_new_storage() -> None:
    base = TensorSpec((4, 6), (1, 4), F32, 0, 3)
    assert inferred("aten::reshape.default", base, [24]).alias == 100
    assert inferred("aten::reshape.default", spec(4, 6, alias=3), [24]).alias == 3


def test_the_memo_keeps_storages_of_different_calls_apart() -> None:
    fresh, view = counter(), resolve("aten::view.default")
    add = resolve("aten::add.Tensor")
    for alias in (1, 2, 9):
        assert infer(view, (spec(4, 6, alias=alias), [24]), {}, fresh).alias == alias
    first, second = (infer(add, (spec(4, alias=a), spec(4, alias=a + 1)), {}, fresh).alias for a in (1, 4))
    assert (first, second) == (100, 101)


def test_one_operand_twice_is_not_two_operands() -> None:
    swap = resolve("aten::add_.Tensor")
    assert infer(swap, (spec(4, alias=1), spec(4, alias=1)), {}, counter()).alias == 1
    assert infer(swap, (spec(4, alias=2), spec(4, alias=1)), {}, counter()).alias == 2


# ------------------------------------------------------------------------------------------------------ memo


@pytest.mark.parametrize("order", list(itertools.permutations([1, 1.0, True])))
def test_the_memo_tells_1_from_1_0_and_true(order: tuple[Any, ...]) -> None:
    x = spec(2, dtype=torch.bool)
    expected = {int: I64, float: F32, bool: torch.bool}
    for constant in order:
        assert inferred("aten::add.Scalar", x, constant).dtype is expected[type(constant)]


def test_a_nan_constant_is_found_in_the_memo() -> None:
    for _ in range(2):
        assert inferred("aten::mul.Scalar", spec(2), float("nan")) == spec(2, alias=100)


def test_the_memo_tells_dtypes_apart() -> None:
    assert [inferred("aten::neg.default", spec(2, dtype=d)).dtype for d in (F32, BF16, I64)] == [F32, BF16, I64]


# ------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("aten::mm.default", (spec(4, 6), spec(5, 6))),
        ("aten::view.default", (spec(4, 6), [5, 5])),
        ("aten::add.Tensor", (spec(4, 6), spec(4))),
        ("tensor_cast::rms_norm", (spec(4, 6), spec(4), 1e-5)),
        ("tensor_cast::swiglu", (spec(4, 6), spec(4, 1))),
        ("tensor_cast::reduce_scatter", (spec(5, 6), 0, 0, [0, 1])),
        ("tensor_cast::all_gather", (spec(5, 6), 2, 0, [0, 1])),
        ("python::getitem", (spec(2, 3), 2)),
    ],
)
def test_arguments_that_do_not_fit_are_a_shape_error_in_one_line(op: str, args: tuple[Any, ...]) -> None:
    for _ in range(2):  # an error is not remembered as a result
        with pytest.raises(ShapeError) as error:
            inferred(op, *args)
        assert "\n" not in str(error.value)


def test_a_shape_error_names_the_op() -> None:
    with pytest.raises(ShapeError, match=r"tensor_cast::reduce_scatter: .*cannot divide size 5"):
        inferred("tensor_cast::reduce_scatter", spec(5, 6), 0, 0, [0, 1])


@pytest.mark.parametrize("target", [len, torch.ops.aten.rand_like.default, torch.ops.aten.nonzero.default])
def test_an_op_without_a_meaning_has_no_shape(target: Any) -> None:
    with pytest.raises(UnsupportedOp):
        infer(target, (spec(2),), {}, counter())


# ------------------------------------------------------------------------------------------------------ fake tensors


@pytest.mark.parametrize("value", [spec(2, 3), TRANSPOSED, EXPANDED, SHIFTED, spec(), spec(0, 3), spec(2, dtype=BF16)])
def test_a_fake_tensor_is_read_back_as_its_spec(value: TensorSpec) -> None:
    fake = fake_tensor(value, new_fake_mode())
    assert TensorSpec.of(fake) == value
    assert fake.device.type == "cpu"


def test_fake_tensors_on_one_storage_are_views_of_each_other() -> None:
    mode = new_fake_mode()
    base = fake_tensor(spec(4, 6), mode)
    view = fake_tensor(SHIFTED, mode, base.untyped_storage())
    assert view.untyped_storage()._cdata == base.untyped_storage()._cdata
    assert TensorSpec.of(view) == SHIFTED


def test_fake_tensors_of_one_mode_compute_together() -> None:
    mode = new_fake_mode()
    total = fake_tensor(spec(4, 6), mode) + fake_tensor(TRANSPOSED, mode)
    assert total.shape == (4, 6)


# ------------------------------------------------------------------------------------------------------ specs


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (2, 0, 4), (0, 0)])
def test_the_contiguous_stride_is_that_of_torch(shape: tuple[int, ...]) -> None:
    assert contiguous_stride(shape) == torch.empty(shape).stride()


def test_layouts_ignore_strides_that_no_access_can_tell_apart() -> None:
    assert TensorSpec((1, 4), (4, 1), F32).layout == TensorSpec((1, 4), (99, 1), F32).layout
    assert TensorSpec((0, 4), (4, 1), F32).layout == TensorSpec((0, 4), (1, 9), F32).layout
    assert TensorSpec((2, 4), (4, 1), F32).layout != TensorSpec((2, 4), (1, 2), F32).layout


def test_a_spec_reads_as_dtype_and_shape() -> None:
    assert str(spec(2, 3, dtype=BF16)) == "bfloat16[2, 3]"
    assert spec(2, 3).numel == 6
    assert spec(2, 3) == TensorSpec.contiguous((2, 3), F32)


def test_products_of_different_dtypes_do_not_fit_together_though_meta_tensors_take_them() -> None:
    halves, floats = (TensorSpec.contiguous((2, 2), dtype) for dtype in (torch.bfloat16, torch.float32))
    with pytest.raises(ShapeError, match="same dtype"):
        infer(resolve("aten::mm"), [halves, floats], {}, lambda: 7)


def test_zeros_are_not_held_against_a_division() -> None:
    whole = TensorSpec.contiguous((2,), torch.int64)
    assert infer(resolve("aten::remainder.Tensor"), [whole, whole], {}, lambda: 7).shape == (2,)


def test_an_integer_that_is_no_dtype_is_refused() -> None:
    """torch crashes on it; signatures call dtypes integers, so that a graph may hold one."""
    x = TensorSpec.contiguous((2, 4), torch.float32)
    fresh = iter(range(9)).__next__
    assert infer(resolve("aten::to.dtype"), (x, 7), {}, fresh).dtype is torch.float64
    with pytest.raises(ShapeError, match="dtype is -1, which is no dtype"):
        infer(resolve("aten::to.dtype"), (x, -1), {}, fresh)
    with pytest.raises(ShapeError, match="dtype is -3, which is no dtype"):
        infer(resolve("aten::sum"), (x,), {"dtype": -3}, fresh)
