"""How users reach a pass of PyTorch: which settings bring it about, and how it is called where nothing does. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


class Code(str):
    """An expression of Python; its repr is the expression."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


#: Replaces generated code by calls of the kernels that eager runs: of passes in front of it, and without a C++ compiler.
EAGER_KERNELS: Mapping[str, Any] = {"fallback_by_default": True}


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How users reach a pass.

    Attributes:
        entry: what users call.
        settings: of `torch._inductor.config`, by dotted name; those that the installed torch does not have are left out.
        comms: of `torch._inductor.config_comms`.
        backend: of torch.compile.
        training: where the pass runs on graphs with a backward: "beside" the program something is differentiated; or part of the
            program is a backward, see `cut`.
        cut: how much of the program is forward, of 1; of training "cut".
        compiled_ranks: which ranks are compiled, see `is_compiled`; the others run eagerly.
        ordered: whether opaque communication is registered as an ordered effect.
        given: expressions of context managers, within which everything is compiled: what stands in for hardware.
        standing_in: what they stand in for; or "".
        unreachable: why no settings bring the pass about here; or "".
        call: lines that call the pass on a graph module `gm`, in place.
        definitions: lines in front of everything.
        placements: of inputs and results by name, where users reach it by DTensor; see `tcverify.pytorch.dtensor`.
    """

    entry: str = "torch.compile"
    settings: Mapping[str, Any] = field(default_factory=dict)
    comms: Mapping[str, Any] = field(default_factory=dict)
    backend: str = "inductor"
    training: Literal["", "beside", "cut"] = ""
    cut: float = 0.5
    compiled_ranks: str = "all"
    ordered: bool = False
    given: tuple[str, ...] = ()
    standing_in: str = ""
    unreachable: str = ""
    call: tuple[str, ...] = ()
    definitions: tuple[str, ...] = ()
    placements: Mapping[str, str] | None = None


def constant(value: float) -> Code:
    """A function that always returns this."""
    return Code(f"lambda *_: {value!r}")


def imported(module: str, *names: str) -> str:
    """The line that imports names of a module."""
    return f"from {module} import {', '.join(names)}"


#: What follows passes that leave nodes in front of what they read.
SORT = (imported("torch._inductor.pattern_matcher", "stable_topological_sort"), "stable_topological_sort(gm.graph)")

#: Lines that answer what estimates of run time ask the device, see `compat.device_known`: scripts run where there is none.
DEVICE_KNOWN = """\
from torch._inductor import comm_analysis
from torch.utils import _runtime_estimation

# Estimates of run time ask which GPU there is: none has to be, and this answers as an A100 would.
for module, name, value in (
    (comm_analysis, "get_gpu_type", comm_analysis.NVIDIA_GPU_TYPE.AMPERE),
    (_runtime_estimation, "get_device_tflops", 312.0),
    (_runtime_estimation, "get_gpu_dram_gbps", 1555.0),
    (_runtime_estimation, "get_device_dram_gbps", 1555.0),
):
    if hasattr(module, name):
        setattr(module, name, lambda *_, value=value, **__: value)"""

__all__ = ["DEVICE_KNOWN", "EAGER_KERNELS", "SORT", "Code", "Pipeline", "constant", "imported"]
