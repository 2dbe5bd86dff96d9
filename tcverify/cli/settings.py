"""What a run is asked to do, and how it ends: plain data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tcverify.cases.baseline import Baseline
from tcverify.options import Options

#: Exit codes.
PASSED, FAILED, UNUSABLE, INTERNAL, INTERRUPTED = 0, 1, 2, 3, 130


@dataclass(frozen=True)
class Settings(Options):
    """What to verify and how to report it; named like the options of the command line.

    Attributes:
        targets: the passes: "module:attribute", or objects without a reference.
        covered: for each pass, the modules for which coverage is recorded; an empty list means those that define
            it. None: no coverage.
        search: whether new programs are derived from earlier ones by what the pass did with them.
        strict: whether hygiene findings refute a pass.
        kernels: whether to show the smallest program for each behaviour of the pass.
    """

    targets: Sequence[Any]
    pass_option: dict[str, str] = field(default_factory=dict)
    contract: dict[str, str] = field(default_factory=dict)
    strict: bool = False
    confirm: str = "gloo"
    pass_timeout: float = 20.0
    report_dir: Path = Path("reports")
    report: Sequence[str] = ()
    fail_on: Sequence[str] = ()
    known: Baseline | None = None
    baseline: Path | None = None
    write_baseline: Path | None = None
    bisect: bool = False
    covered: Sequence[Sequence[str]] | None = None
    search: bool = False
    kernels: bool = False
    corpus: Path | None = None
    workers: int | None = None
    ray: str | None = None


def new_seed() -> int:
    """A random seed, if the user gave none."""
    return int.from_bytes(os.urandom(4), "little")


__all__ = ["FAILED", "INTERNAL", "INTERRUPTED", "PASSED", "UNUSABLE", "Settings", "new_seed"]
