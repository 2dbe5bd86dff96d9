"""Arguments that are written in other ways give what torch gives for the plain ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tcverify.ops import OPEN_END, TensorSpec, equivalent_arguments

X = torch.arange(24.0).reshape(2, 3, 4)

#: Calls, and by position the ways to write an argument.
CALLS: dict[str, tuple[str, tuple[Any, ...], dict[int, list[Any]]]] = {
    "dim": ("softmax.int", (X, -1), {1: [2, -1]}),
    "two dims": ("transpose.int", (X, 0, -1), {1: [0, -3], 2: [2, -1]}),
    "dims": ("sum.dim_IntList", (X, [0, -2]), {1: [[0, 1], [-3, -2]]}),
    "permutation": ("permute.default", (X, [2, 0, 1]), {1: [[2, 0, 1], [-1, -3, -2]]}),
    "of the result": ("unsqueeze.default", (X, 1), {1: [1, -3]}),
    "of the results": ("stack.default", ([X, X], 3), {1: [3, -1]}),
    "diagonals": ("diag_embed.default", (X, 0, 1, 2), {2: [1, -3], 3: [2, -2]}),
    "of a list": ("cat.default", ([torch.ones(0), X, X], 1), {1: [1, -2]}),
    "index": ("select.int", (X, -1, 3), {1: [2, -1], 2: [3, -1]}),
    "bounds": ("slice.Tensor", (X, 2, 1, 3), {1: [2, -1], 2: [1, -3], 3: [3, -1]}),
    "open end": ("slice.Tensor", (X, 2, 0, OPEN_END), {1: [2, -1], 2: [0, -4], 3: [4, OPEN_END]}),
    "end beyond": ("slice.Tensor", (X, 1, -9, 7), {1: [1, -2], 2: [0, -3], 3: [3, OPEN_END]}),
    "written bounds": ("slice_scatter.default", (X, torch.ones(1, 3, 4), 0, 1, 2), {2: [0, -3], 3: [1, -1], 4: [2, OPEN_END]}),
    "view": ("view.default", (X, [-1, 4]), {1: [[6, 4], [-1, 4], [6, -1]]}),
    "expand": ("expand.default", (X[:, :1], [2, 5, -1]), {1: [[2, 5, 4], [-1, 5, -1]]}),
    "expand by a dim": ("expand.default", (X, [5, 2, 3, 4]), {1: [[5, 2, 3, 4], [5, -1, -1, -1]]}),
    "split": ("split.Tensor", (X, 2, 1), {2: [1, -2]}),
}  # fmt: skip


def spec_of(value: Any) -> Any:
    return [spec_of(one) for one in value] if isinstance(value, list) else TensorSpec.of(value)


@pytest.mark.parametrize("name", CALLS)
def test_all_ways_mean_the_same(name: str) -> None:
    op, args, ways = CALLS[name]
    packet, overload = op.split(".")
    target = getattr(getattr(torch.ops.aten, packet), overload)
    found = equivalent_arguments(target, args, spec_of(args[0]))
    assert found == ways
    expected = target(*args)
    for place, values in found.items():
        for value in values:
            got = target(*args[:place], value, *args[place + 1 :])
            torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (torch.ops.aten.softmax.int, (torch.tensor(1.0), 0)),
        (torch.ops.aten.softmax.int, (X, 3)),
        (torch.ops.aten.view.default, (torch.ones(0, 2), [0, 2])),
        (torch.ops.aten.select_backward.default, (X, [2, 3, 5, 4], 2, 1)),
        (torch.ops.aten.add.Tensor, (X, 2)),
        (torch.ops._c10d_functional.all_gather_into_tensor.default, (X, 2, "0")),
    ],
)
def test_nothing_is_known_of_other_arguments(target: Any, args: tuple[Any, ...]) -> None:
    assert equivalent_arguments(target, args, TensorSpec.of(args[0])) == {}
    assert equivalent_arguments(target, args, None) == {}
