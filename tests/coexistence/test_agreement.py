"""What tcverify knows of the library's ops is what the library says of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from tcverify.ops import TensorSpec
from tcverify.ops.dialects.tensor_cast.library import OPS, SCHEMAS
from tests.coexistence import standin
from tests.ops.test_library import ARGUMENTS, LAYOUTS

#: What the library does not have.
OURS = {"routed_matmul"}
KERNELS: dict[str, Callable[..., Any]] = {kernel.__name__: kernel for kernel in standin.OPS}


def layouts(value: Any) -> Any:
    """Shape, stride and dtype of every tensor of a result."""
    return pytree.tree_map_only(torch.Tensor, lambda t: TensorSpec.of(t).layout, value)


def test_the_library_has_every_op_that_we_know() -> None:
    assert set(KERNELS) - set(SCHEMAS) == {"something_new"}
    assert set(SCHEMAS) - set(KERNELS) == OURS


@pytest.mark.parametrize(
    "op", [op for op in OPS if op.name.split("::")[1] not in OURS], ids=lambda op: op.name.split("::")[1]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_have_the_layout_that_the_library_says(op: Any, layout: Callable[..., torch.Tensor]) -> None:
    name = op.name.split("::")[1]
    arguments = ARGUMENTS[name](layout)
    assert layouts(op.fake(*arguments)) == layouts(KERNELS[name](*arguments))


@pytest.mark.parametrize("name", sorted(set(SCHEMAS) - OURS))
def test_signatures_are_those_that_torch_reads_from_the_library(name: str) -> None:
    theirs = torch._C.parse_schema(name + torch.library.infer_schema(KERNELS[name], mutates_args=()))
    ours = torch._C.parse_schema(name + SCHEMAS[name])
    assert [(a.name, str(a.type), a.default_value) for a in theirs.arguments] == [
        (a.name, str(a.type), a.default_value) for a in ours.arguments
    ]
