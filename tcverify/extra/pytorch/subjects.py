"""What of PyTorch can be verified by name, and in which of its versions that exists. Data; importing it imports no pass."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from tcverify.errors import UsageError

PREFIX = "torch:"


@dataclass(frozen=True, slots=True)
class TorchSubject:
    """A part of PyTorch that can be verified as a pass.

    Attributes:
        name: as the command line takes it, behind the prefix.
        target: the class that applies it, as module:attribute.
        what: one line on it.
        source: where PyTorch defines it, as module:name.
        since: the first version of torch that has it, of those that tcverify supports.
        until: the last one; None where the newest has it.
        strategy: which programs give it something to do.
        draws: values of its options, by name, the default first.
    """

    name: str
    target: str
    what: str
    source: str
    since: str = "2.9"
    until: str | None = None
    strategy: str = "functional"
    draws: Mapping[str, Sequence[Any]] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def versions(self) -> str:
        """The versions of torch that have it, in words."""
        return f"torch {self.since} and later" if self.until is None else f"torch {self.since} to {self.until}"

    @property
    def here(self) -> bool:
        """Whether this torch has it."""
        module, _, name = self.source.partition(":")
        return name in _defined(module)


@functools.cache
def _defined(module: str) -> frozenset[str]:
    """The names that a module defines, read from its source: importing Inductor takes seconds."""
    # The parents of `module` are packages of torch, which find_spec would import.
    path = Path(torch.__file__).parent.joinpath(*module.split(".")[1:])
    source = next((one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file()), None)
    if source is None:
        return frozenset()
    found: set[str] = set()
    for statement in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            found.add(statement.name)
        elif isinstance(statement, ast.Assign):
            found.update(target.id for target in statement.targets if isinstance(target, ast.Name))
    return frozenset(found)


def subject(name: str) -> TorchSubject:
    """Return the subject that a name with the prefix means.

    Raises:
        UsageError: there is none, or this torch has it not.
    """
    found = SUBJECTS.get(name.removeprefix(PREFIX))
    if found is None:
        raise UsageError(
            f"there is no subject '{name}'", f"PyTorch's are {', '.join(PREFIX + one for one in SUBJECTS)}"
        )
    if not found.here:
        raise UsageError(
            f"torch {torch.__version__} has no {found.source}", f"'{name}' can be verified with {found.versions}"
        )
    return found


_BUCKETING = "torch._inductor.fx_passes.bucketing"
_MODES = ("default", "custom_ops", "custom_ops_multidtype", "coalesced")
_CAPS = (2000.0, 0.0, 0.0001, 0.001)
_FLAG = (False, True)
_OVERLAP_LISTS = (
    ("reorder_compute_for_overlap", "sink_waits", "raise_comms"),
    ("sink_waits", "raise_comms"),
    ("raise_comms", "sink_waits"),
    ("reorder_compute_for_overlap",),
    ("reorder_communication_preserving_peak_memory",),
    ("sink_waits_iterative",),
    (
        "reorder_communication_preserving_peak_memory",
        "sink_waits_iterative",
        "reorder_communication_preserving_peak_memory",
    ),
    ("raise_comms", "sink_waits", "reorder_compute_for_overlap"),
    (),
)

_ALL = (
    TorchSubject(
        "bucket_all_gather", "tcverify.extra.pytorch.bucketing:BucketAllGather",
        "independent all_gathers of a group become one", f"{_BUCKETING}:bucket_all_gather",
        draws={"mode": _MODES[:3], "cap_mb": _CAPS},
    ),
    TorchSubject(
        "compile", "tcverify.extra.pytorch.compiling:Compile",
        "the graph becomes what the code does that Inductor generates", "torch._inductor.compile_fx:compile_fx",
        draws={
            "compiled_ranks": ("all", "first", "even", "odd"),
            "reorder_for_compute_comm_overlap": _FLAG,
            "reorder_for_compute_comm_overlap_passes": _OVERLAP_LISTS,
            "reorder_for_peak_memory": (True, False),
            "allow_buffer_reuse": (True, False),
            "inplace_buffers": (True, False),
            "reorder_for_locality": (True, False),
            "aggressive_fusion": _FLAG,
        },
    ),
)  # fmt: skip

#: What can be verified, by name without the prefix.
SUBJECTS: dict[str, TorchSubject] = {one.name: one for one in _ALL}

__all__ = ["PREFIX", "SUBJECTS", "TorchSubject", "subject"]
