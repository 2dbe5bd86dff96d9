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


def has_nccl() -> bool:
    """Whether this torch supports process groups on CUDA devices, and a device is present."""
    return dist.is_available() and dist.is_nccl_available() and torch.cuda.is_available()


def require_backend(confirm: str, option: str = "--confirm") -> None:
    """Raise UsageError unless this machine supports the process group ("gloo", "nccl" or "none") that an option asks for."""
    if confirm == "gloo" and not has_gloo():
        raise UsageError(
            "this torch is built without gloo", f"use {option} none (lockstep only), or install a torch with gloo"
        )
    if confirm == "nccl" and not has_nccl():
        raise UsageError("there is no CUDA device with NCCL", f"use {option} gloo, which runs on the CPU")


def facts() -> dict[str, str]:
    """Return the capabilities of this machine by name."""
    nccl = (
        f"available, {torch.cuda.device_count()} CUDA devices"
        if has_nccl()
        else "no CUDA device, or not built into this torch"
    )
    return {
        **collect_versions(),
        "cores": str(len(os.sched_getaffinity(0))),
        "gloo": "available" if has_gloo() else "not built into this torch",
        "nccl": nccl,
        "streams": _streams(),
    }


def _streams() -> str:
    """Where the streams of lowered programs can run."""
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not devices:
        return "in lockstep only: no CUDA device"
    return f"in lockstep and on CUDA streams; NCCL connects up to {devices if has_nccl() else 0} ranks, gloo more"


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


__all__ = ["facts", "has_gloo", "has_nccl", "require_backend", "try_collective"]
