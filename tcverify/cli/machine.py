"""What this machine can run, and a test of one real collective."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from tcverify.cases.counterexample import collect_versions
from tcverify.errors import TcverifyError, UsageError
from tcverify.execution import Lockstep, ProcessGroupPool
from tcverify.program import PARTIAL, InputSpec, Mesh, spmd_program


def has_gloo() -> bool:
    """Whether this torch supports process groups on the CPU."""
    return dist.is_available() and dist.is_gloo_available()


def require_backend(confirm: str, option: str = "--confirm") -> None:
    """Raise UsageError unless this machine has the process group ("gloo", "cuda", "nccl" or "none") that an option asks for."""
    if confirm == "gloo" and not has_gloo():
        raise UsageError(
            "this torch is built without gloo", f"use {option} none (lockstep only), or install a torch with gloo"
        )
    if confirm in ("cuda", "nccl") and not torch.cuda.is_available():
        raise UsageError("there is no CUDA device", f"use {option} gloo, which runs on the CPU")


def facts() -> dict[str, str]:
    """Return the capabilities of this machine by name."""
    return {
        **collect_versions(),
        "cores": str(len(os.sched_getaffinity(0))),
        "gloo": "available" if has_gloo() else "not built into this torch",
        "cuda": _cuda(),
    }


def _cuda() -> str:
    """Which CUDA devices there are, and what `--confirm cuda` does with them."""
    if not torch.cuda.is_available():
        return "no device, or not built into this torch"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    nccl = f"NCCL for up to {len(names)} ranks" if dist.is_nccl_available() else "no NCCL in this torch"
    return f"{', '.join(names)}; {nccl}, gloo for more, which share devices"


def try_collective() -> str | None:
    """Run one all_reduce in lockstep and on two gloo ranks; return the problem, if any."""
    x = InputSpec("x", (4,), placements=(("tp", PARTIAL),))
    mesh = Mesh.grid({"tp": 2})
    program = spmd_program(mesh, [x], lambda b: b.call("tensor_cast::all_reduce", b.input("x"), b.rank, b.group("tp")))
    try:
        with ProcessGroupPool(2) as pool:
            real = pool.run(program)
    except TcverifyError as error:
        return f"fails: {error}"
    expected = Lockstep().run(program)
    for mine, theirs in zip(expected.ranks, real.ranks, strict=True):
        if theirs.error is not None or not torch.allclose(mine.outputs[0], theirs.outputs[0], rtol=0, atol=1e-12):
            return f"differs from lockstep on rank {mine.rank}"
    return None


__all__ = ["facts", "has_gloo", "require_backend", "try_collective"]
