"""What functional collectives mean, against NCCL with one rank: its API, and its coalesced forms."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tcverify.execution import Lockstep
from tcverify.program import InputSpec, Mesh, spmd_program

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not (dist.is_available() and dist.is_nccl_available()), reason="needs a torch with NCCL"),
]

ONE = Mesh.grid({"tp": 1})


@pytest.fixture
def group(tmp_path: Path) -> Iterator[str]:
    """The name of a process group of one rank."""
    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        yield dist.group.WORLD.group_name
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("op", "arguments"), [
    ("all_reduce", ("sum",)),
    ("all_reduce", ("avg",)),
    ("all_gather_into_tensor", (1,)),
    ("reduce_scatter_tensor", ("sum", 1)),
    ("reduce_scatter_tensor", ("max", 1)),
    ("all_to_all_single", ([4], [4])),
    ("broadcast", (0,)),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_nccl_collectives_of_one_rank_agree_with_lockstep(
    group: str, op: str, arguments: tuple[Any, ...], dtype: torch.dtype
) -> None:
    spec = InputSpec("x", (4, 3), dtype)
    program = spmd_program(
        ONE, [spec], lambda b: wait(b, b.call(f"_c10d_functional::{op}", b.input("x"), *arguments, "tp"))
    )
    expected = Lockstep().run(program).ranks[0].outputs[0]
    x = program.inputs[0].values(ONE, 0, program.sources.seed).to(dtype)
    found = getattr(torch.ops._c10d_functional, op)(x.cuda(), *arguments, group)
    found = torch.ops._c10d_functional.wait_tensor(found).cpu()
    assert found.shape == expected.shape
    assert torch.allclose(found.to(expected.dtype), expected, rtol=1e-2 if dtype is torch.bfloat16 else 1e-14, atol=0)


@pytest.mark.parametrize(("op", "arguments"), [
    ("all_reduce_coalesced", ("sum",)),
    ("all_gather_into_tensor_coalesced", (1,)),
    ("reduce_scatter_tensor_coalesced", ("sum", 1)),
])  # fmt: skip
def test_nccl_coalesced_collectives_of_one_rank_give_back_each_operand(
    group: str, op: str, arguments: tuple[Any, ...]
) -> None:
    operands = [torch.randn(n, 3, device="cuda") for n in (1, 4, 7)]
    found = getattr(torch.ops._c10d_functional, op)(operands, *arguments, group)
    for operand, one in zip(operands, found, strict=True):
        assert torch.equal(torch.ops._c10d_functional.wait_tensor(one), operand)


def test_nccl_keeps_to_the_stream_that_calls_it(group: str) -> None:
    """What reads on another stream without a wait is too early; behind an event it is not."""
    side, x = torch.cuda.Stream(), torch.ones(1 << 20, device="cuda")
    early, late = torch.empty_like(x), torch.empty_like(x)
    for delayed in (False, True):  # the first run loads kernels and makes the communicator
        total = torch.zeros_like(x)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(int(1e8) if delayed else 1)
            total.copy_(x)
            dist.all_reduce(total)
            done = side.record_event()
        early.copy_(total)
        torch.cuda.current_stream().wait_event(done)
        late.copy_(total)
    torch.cuda.synchronize()
    assert float(early.sum()) == 0
    assert float(late.sum()) == x.numel()


def wait(b: Any, started: Any) -> Any:
    return b.call("_c10d_functional::wait_tensor", started)
