"""The fsdp ops against torch's own kernels, freed storages, and memory that nobody has written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tcverify.domains import FLOAT64, domain_of
from tcverify.execution import Lockstep
from tcverify.ops import RESIZE, ShapeError, TensorSpec, infer, lookup, resolve, schema_of
from tcverify.program import GraphBuilder, InputSpec, Mesh, Program, dumps, loads, shard, spmd_program

DP2 = Mesh.grid({"dp": 2})
DOMAINS = ("float64", "native", "exact:0", "exact:1")

Case = tuple[str, list[Any], dict[str, Any]]


def numbers(*shape: int, dtype: torch.dtype = torch.float32, start: int = 1) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(start, start + count, dtype=torch.float32).reshape(shape).to(dtype)


def blank(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, -1.0, dtype=dtype)


BF16 = torch.bfloat16

#: Calls that torch accepts. Made anew for every run: the ops write into their operands.
SOUND: dict[str, Callable[[], Case]] = {
    "copy_in": lambda: ("all_gather_copy_in", [[numbers(2), numbers(3, start=9)], blank(15), [2, 3], 5, 1], {}),
    "copy_in, last rank": lambda: ("all_gather_copy_in", [[numbers(4)], blank(8), [4], 4, 1], {}),
    "copy_in that casts": lambda: (
        "all_gather_copy_in", [[numbers(2), numbers(3, dtype=BF16)], blank(10, dtype=BF16), [2, 3], 5, 0], {}
    ),
    "copy_in that broadcasts": lambda: ("all_gather_copy_in", [[numbers(1)], blank(8), [4], 4, 0], {}),
    "copy_in of nothing": lambda: ("all_gather_copy_in", [[numbers(0), numbers(3)], blank(6), [0, 3], 3, 1], {}),
    "split": lambda: ("split_with_sizes_copy", [numbers(2, 5), [2, 3], 1], {"out": [blank(2, 2), blank(2, 3)]}),
    "split along dim 0": lambda: ("split_with_sizes_copy", [numbers(5), [1, 4], 0], {"out": [blank(1), blank(4)]}),
    "split into views": lambda: (
        "split_with_sizes_copy", [numbers(2, 5), [2, 3], 1], {"out": [blank(2, 4)[:, 1:3], blank(3, 2).t()]}
    ),
    "chunk_cat": lambda: ("chunk_cat", [[numbers(4, 3), numbers(2)], 0, 2], {"out": blank(2, 7)}),
    "chunk_cat that pads": lambda: (
        "chunk_cat", [[numbers(5, 2), numbers(1, start=50), numbers(3, 1, start=70)], 0, 2], {"out": blank(2, 9)}
    ),
    "chunk_cat that casts": lambda: ("chunk_cat", [[numbers(4, dtype=BF16)], 0, 4], {"out": blank(4, 1)}),
    "chunk_cat along dim 1": lambda: ("chunk_cat", [[numbers(3, 4), numbers(3, 5, 2)], 1, 2], {"out": blank(3, 2, 8)}),
    "chunk_cat along dim -1": lambda: ("chunk_cat", [[numbers(3, 4)], -1, 2], {"out": blank(3, 2, 2)}),
    "copy": lambda: ("copy_", [blank(2, 3), numbers(2, 3)], {}),
    "copy that casts": lambda: ("copy_", [blank(2, 3, dtype=BF16), numbers(2, 3)], {}),
    "copy that broadcasts": lambda: ("copy_", [blank(2, 3), numbers(3)], {}),
}  # fmt: skip

if hasattr(torch.ops.fsdp, "chunk_cat_mixed_dtype"):
    SOUND["chunk_cat of several dtypes"] = lambda: (
        "chunk_cat_mixed_dtype", [[numbers(4), numbers(3, 2, dtype=BF16)], 0, 2], {"out": blank(2, 6)}
    )  # fmt: skip

#: Calls that raise here; torch raises too, but where it gives an output another shape.
UNSOUND: dict[str, Callable[[], Case]] = {
    "copy_in past the end": lambda: ("all_gather_copy_in", [[numbers(5)], blank(10), [5], 5, 2], {}),
    "copy_in of too few": lambda: ("all_gather_copy_in", [[numbers(5)], blank(10), [2, 3], 5, 0], {}),
    "copy_in with other sizes": lambda: ("all_gather_copy_in", [[numbers(2), numbers(3)], blank(10), [3, 2], 5, 0], {}),
    "copy_in with sizes that do not add up": lambda: ("all_gather_copy_in", [[numbers(4)], blank(10), [4], 5, 0], {}),
    "split that does not add up": lambda: ("split_with_sizes_copy", [numbers(2, 5), [2, 2], 1], {"out": [blank(2, 2)] * 2}),
    "split into too few": lambda: ("split_with_sizes_copy", [numbers(2, 5), [2, 3], 1], {"out": [blank(2, 2)]}),
    "split into another dtype": lambda: ("split_with_sizes_copy", [numbers(2), [2]], {"out": [blank(2, dtype=BF16)]}),
    "chunk_cat of other dtypes": lambda: ("chunk_cat", [[numbers(4), numbers(4, dtype=BF16)], 0, 2], {"out": blank(2, 4)}),
    "chunk_cat of other sizes": lambda: ("chunk_cat", [[numbers(3, 4), numbers(2, 4)], 1, 2], {"out": blank(3, 2, 4)}),
    "chunk_cat of nothing": lambda: ("chunk_cat", [[], 0, 2], {"out": blank(2, 1)}),
    "chunk_cat along no dim": lambda: ("chunk_cat", [[numbers(4)], 1, 2], {"out": blank(2, 1)}),
    "copy that does not fit": lambda: ("copy_", [blank(2, 3), numbers(2)], {}),
}  # fmt: skip


def called(run: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """What a call returns, and what its operands hold then."""
    result = run(*args, **kwargs)
    found: list[torch.Tensor] = list(result or ())
    for operand in (*args, *kwargs.values()):
        found += [operand] if isinstance(operand, torch.Tensor) else []
        found += [leaf for leaf in operand if isinstance(leaf, torch.Tensor)] if isinstance(operand, list) else []
    return found


@pytest.mark.parametrize("name", SOUND)
def test_an_op_computes_what_torch_computes(name: str) -> None:
    op, args, kwargs = SOUND[name]()
    target = resolve(f"fsdp::{op}")
    try:
        expected = called(target, args, kwargs)
    except TypeError as error:
        if name != "split along dim 0" or "missing 1 required positional argument: 'dim'" not in str(error):
            raise
        pytest.skip(f"the kernel of torch {torch.__version__} lacks the defaults of its own signature: {error}")
    _, again, more = SOUND[name]()
    found = called(lookup(target).require(), again, more)
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, check_stride=True)


@pytest.mark.parametrize("name", UNSOUND)
def test_arguments_that_do_not_fit_are_refused(name: str) -> None:
    op, args, kwargs = UNSOUND[name]()
    with pytest.raises((ValueError, RuntimeError)):
        lookup(resolve(f"fsdp::{op}")).require()(*args, **kwargs)
    _, args, kwargs = UNSOUND[name]()
    with pytest.raises(Exception):  # noqa: B017 - whatever torch raises
        resolve(f"fsdp::{op}")(*args, **kwargs)


def test_outputs_are_not_given_another_shape() -> None:
    split, chunks = resolve("fsdp::split_with_sizes_copy"), resolve("fsdp::chunk_cat")
    with pytest.raises(ValueError, match=r"writes shape \[2, 3\] into an output of shape \[6\]"):
        lookup(split).require()(numbers(2, 5), [2, 3], 1, out=[blank(2, 2), blank(6)])
    with pytest.raises(ValueError, match=r"writes shape \[2, 2\] into an output of shape \[4\]"):
        lookup(chunks).require()([numbers(4)], 0, 2, out=blank(4))


def test_a_scalar_has_no_chunks() -> None:
    """torch's kernel ends the process."""
    with pytest.raises(ValueError, match="along dim 0 of a tensor of shape"):
        lookup(resolve("fsdp::chunk_cat")).require()([numbers()], 0, 2, out=blank(2, 1))


def test_the_schemas_say_what_is_written() -> None:
    copy_in = schema_of(resolve("fsdp::all_gather_copy_in"))
    assert copy_in is not None
    assert copy_in.is_mutable
    written = [a.name for a in copy_in.arguments if a.alias_info is not None and a.alias_info.is_write]
    assert written == ["all_gather_output"]
    assert all(r.alias_info is not None for r in copy_in.returns)
    resize = schema_of(resolve(RESIZE))
    assert resize is not None
    assert resize.is_mutable
    assert not resolve(RESIZE)._schema.is_mutable  # which is why the tables say it


def test_shapes_and_aliases_are_inferred() -> None:
    buffer = TensorSpec((8,), (1,), BF16, alias=3)
    source = TensorSpec((4,), (1,), torch.float32, alias=7)
    mine, whole = infer(
        resolve("fsdp::all_gather_copy_in"), [[source], buffer, [4], 4, 1], {}, iter(range(50)).__next__
    )
    assert mine == TensorSpec((4,), (1,), BF16, 4, alias=3)
    assert whole == buffer
    with pytest.raises(ShapeError, match=r"torch\.float32"):
        infer(resolve("fsdp::split_with_sizes_copy"), [source, [4]], {"out": [buffer]}, iter(range(50)).__next__)


@pytest.mark.parametrize(("size", "fits"), [(0, True), (7, False), (8, True), (800, True), (-1, False)])
def test_a_storage_is_freed_or_whole(size: int, fits: bool) -> None:
    half = TensorSpec((2,), (1,), BF16, offset=2, alias=0)  # its storage has 4 elements at least
    if fits:
        assert infer(resolve(RESIZE), [half, size], {}, iter(range(9)).__next__) is None
    else:
        with pytest.raises(ShapeError, match="resize_storage_bytes_ to"):
            infer(resolve(RESIZE), [half, size], {}, iter(range(9)).__next__)


# -------------------------------------------------------------------------------------------------------- freed storages


def freeing(*then: str, dtype: torch.dtype = BF16) -> Program:
    """A program that frees a view of its input, does some of these things, and returns the sum of another input."""

    def build(b: GraphBuilder) -> Any:
        x, w = b.input("x"), b.input("w")
        flat = b.call("aten::view", w, [-1])
        b.call(RESIZE, flat, 0)
        result = b.call("aten::sum", x)
        for step in then:
            if step == "allocate":
                b.call(RESIZE, w, 16 * dtype.itemsize)
            elif step == "copy":
                b.call("fsdp::copy_", w, b.call("aten::mul.Tensor", x, 2.0))
            elif step == "view":
                w = b.call("aten::t", w)
            elif step == "read":
                result = b.call("aten::add.Tensor", result, b.call("aten::sum", w))
            elif step == "free":
                b.call(RESIZE, w, 0)
        return result

    return spmd_program(DP2, [InputSpec("x", (4, 4), dtype), InputSpec("w", (4, 4), dtype)], build)


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize(
    ("then", "where"),
    [
        (("read",), "sum_2"),
        (("view", "read"), "sum_2"),
        (("copy",), "copy_"),
        (("allocate", "copy", "read", "free", "read"), "sum_3"),
    ],
)
def test_use_after_free_names_the_node(then: tuple[str, ...], where: str, domain: str) -> None:
    run = Lockstep().run(freeing(*then), domain=domain_of(domain))
    assert run.error is not None
    assert run.error.error is not None
    assert run.error.error.node == where
    assert "use after free" in run.error.error.message
    assert "resize_storage_bytes_" in run.error.error.message


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_what_is_allocated_again_can_be_used(domain: str, dtype: torch.dtype) -> None:
    program = freeing("view", "allocate", "copy", "read", "free", dtype=dtype)
    kept = loads(dumps(program))
    for each in (program, kept):
        run = Lockstep().run(each, domain=domain_of(domain))
        assert run.finished
        assert bool(run.ranks[0].outputs[0].isfinite())


def test_allocated_memory_holds_nothing_of_use() -> None:
    run = Lockstep().run(freeing("allocate", "read"))
    assert run.finished
    assert bool(run.ranks[0].outputs[0].isnan())
    assert bool(run.ranks[0].inputs[1].isnan().all())


# ------------------------------------------------------------------------------------------------------ unwritten memory

EMPTIES: dict[str, Callable[[GraphBuilder, Any], Any]] = {
    "empty": lambda b, x: b.call("aten::empty.memory_format", [4, 4], dtype=BF16),
    "empty of no dtype": lambda b, x: b.call("aten::empty.memory_format", [4, 4]),
    "empty_like": lambda b, x: b.call("aten::empty_like", x),
    "new_empty": lambda b, x: b.call("aten::new_empty", x, [4, 4]),
    "empty_strided": lambda b, x: b.call("aten::empty_strided", [4, 4], [1, 4], dtype=torch.float32),
    "new_empty_strided": lambda b, x: b.call("aten::new_empty_strided", x, [4, 4], [8, 1]),
    "empty_permuted": lambda b, x: b.call("aten::empty_permuted", [4, 4], [1, 0], dtype=torch.float32),
}


def with_empty(make: Callable[[GraphBuilder, Any], Any], written: bool) -> Program:
    def build(b: GraphBuilder) -> Any:
        x = b.input("x")
        made = make(b, x)
        if written:
            b.call("aten::copy_", b.call("aten::slice.Tensor", made, 0, 0, 2), b.call("aten::slice.Tensor", x, 0, 0, 2))
            made = b.call("aten::slice.Tensor", made, 0, 0, 2)
        return b.call("aten::add.Tensor", made, 1.0)

    return spmd_program(DP2, [InputSpec("x", (4, 4))], build)


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("name", EMPTIES)
def test_memory_shows_where_nobody_has_written_it(name: str, domain: str) -> None:
    run = Lockstep().run(with_empty(EMPTIES[name], written=False), domain=domain_of(domain))
    assert run.finished
    found = run.ranks[0].outputs[0]
    if domain.startswith("exact"):
        assert bool((found == found[0, 0]).all())
        assert bool(found.isfinite().all())
        assert abs(float(found[0, 0])) > 1e5
    else:
        assert bool(found.isnan().all())


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("name", EMPTIES)
def test_memory_holds_what_was_written(name: str, domain: str) -> None:
    run = Lockstep().run(with_empty(EMPTIES[name], written=True), domain=domain_of(domain))
    x = run.ranks[0].inputs[0]
    assert run.finished
    torch.testing.assert_close(run.ranks[0].outputs[0].double(), x[:2].double() + 1.0, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool])
def test_unwritten_integers_are_no_indices(dtype: torch.dtype) -> None:
    empty = lookup(torch.ops.aten.empty.memory_format).require()
    found = empty([3], dtype=dtype)
    assert found.dtype is dtype
    assert bool((found == found[0]).all())
    assert dtype is torch.bool or not 0 <= int(found[0]) < 100


def test_inputs_that_are_freed_at_the_end_compare_equal() -> None:
    first, second = (Lockstep().run(freeing("allocate", "copy", "free")) for _ in range(2))
    assert first.finished
    assert FLOAT64.name == first.domain
    for a, b in zip(first.ranks, second.ranks, strict=True):
        assert torch.equal(a.inputs[1].isnan(), b.inputs[1].isnan())


def test_a_gathered_parameter_is_the_whole_of_its_shards() -> None:
    """copy_in, all_gather into the buffer, copy_out, and a gradient the other way, with torch's layout of shards."""
    whole = numbers(4, 3)

    def build(b: GraphBuilder) -> Any:
        piece = b.call("aten::view", b.input("w"), [-1])
        buffer = b.call("aten::empty.memory_format", [12], dtype=torch.float32)
        both = b.call("fsdp::all_gather_copy_in", [piece], buffer, [6], 6, b.constant("position", lambda r: r))
        out = b.call(
            "_c10d_functional::all_gather_into_tensor_out", b.getitem(both, 0), 2, "dp", out=b.getitem(both, 1)
        )
        gathered = b.call("aten::view", b.call("_c10d_functional::wait_tensor", out), [4, 3])
        flat = b.call("aten::empty.memory_format", [12], dtype=torch.float32)
        b.call("fsdp::chunk_cat", [gathered], 0, 2, out=b.call("aten::view", flat, [2, 6]))
        scattered = b.call("_c10d_functional::reduce_scatter_tensor", flat, "sum", 2, "dp")
        return gathered, b.call("_c10d_functional::wait_tensor", scattered)

    program = spmd_program(DP2, [InputSpec("w", (4, 3), placements=(("dp", shard(0)),))], build)
    run = Lockstep().run(program)
    assert run.finished
    gathered, gradient = run.ranks[1].outputs
    shards = [result.inputs[0] for result in run.ranks]
    assert torch.equal(gathered, torch.cat(shards))
    assert torch.equal(gradient, 2 * shards[1].reshape(-1))
    assert whole.shape == gathered.shape
