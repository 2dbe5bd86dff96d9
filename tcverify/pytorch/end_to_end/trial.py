"""Tries a case in PyTorch's public API: runs its script in a process of its own, and says what became of it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tcverify.cases.counterexample import Counterexample
from tcverify.cases.end_to_end import EndToEnd
from tcverify.errors import TcverifyError, Unsupported, UsageError
from tcverify.pytorch.end_to_end.pipeline import EAGER_KERNELS, Pipeline
from tcverify.pytorch.end_to_end.script import SECONDS, make_script
from tcverify.pytorch.scripts import run_alone
from tcverify.pytorch.subjects import SUBJECTS
from tcverify.registry.references import find

#: What a script may take beyond the time that it gives its ranks: importing torch, on a busy machine.
MORE_SECONDS = 30

#: Characters of a reason.
MAX_DETAIL = 300


def is_subject(case: Counterexample) -> bool:
    """Whether a case is of a pass of PyTorch that has a name here."""
    return any(one.target == case.facts.target for one in SUBJECTS.values())


def pipeline_of(case: Counterexample) -> Pipeline:
    """How users reach the pass of a case with the options that it was found with.

    Raises:
        UsageError: it is no pass of PyTorch, or has no such option.
    """
    if not is_subject(case):
        raise UsageError(
            f"'{case.facts.name}' is not a pass of PyTorch",
            "issues for PyTorch are written of cases of torch: subjects; `tcverify passes` lists them",
        )
    subject: Any = find(case.facts.target)[0]
    options: Mapping[str, Any] = subject.chosen(case.program.options, case.facts.options)
    found: Pipeline = subject.pipeline(options)
    return found


def try_end_to_end(case: Counterexample) -> EndToEnd | None:
    """Run a case as a user would; None where it is of no pass of PyTorch. Whatever goes wrong on the way is told, not raised."""
    if not is_subject(case):
        return None
    entry = "torch.compile"
    try:
        pipeline = pipeline_of(case)
        entry = pipeline.entry
        if pipeline.unreachable:
            return EndToEnd("unreachable", entry, pipeline.unreachable)
        told = run_script(make_script(case, pipeline, "users"), entry)
        return told if told.state != "shown" else _with_defaults(told, case, pipeline)
    except Unsupported as error:
        return EndToEnd("unreachable", entry, error.message)
    except TcverifyError as error:
        return EndToEnd("failed", entry, error.message)
    except Exception as error:  # noqa: BLE001 - the finding is there, whatever becomes of its trial
        return EndToEnd("failed", entry, f"{type(error).__name__}: {error}"[:200])


def _with_defaults(told: EndToEnd, case: Counterexample, pipeline: Pipeline) -> EndToEnd:
    """Say so if the same goes wrong without the settings that switch the pass on: then another pass may be at fault."""
    if not {*pipeline.settings} - {*EAGER_KERNELS} and not pipeline.comms:
        return told
    defaults = replace(pipeline, settings=EAGER_KERNELS, comms={})
    other = run_script(make_script(case, defaults, "users"), told.entry)
    return replace(told, with_defaults=(other.state, other.detail) == ("shown", told.detail))


def run_script(text: str, entry: str, seconds: float = SECONDS + MORE_SECONDS) -> EndToEnd:
    """Run a script, and read what it says; see `make_script`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.py"
        path.write_text(text, encoding="utf-8")
        code, out, errors = run_alone(path, Path(folder), seconds, _cache())
    if code is None:
        return EndToEnd("failed", entry, f"the script did not end within {seconds:g} s")
    lines = out.strip().splitlines()
    if code in (0, 1) and len(lines) > 1:
        told = tuple(line for line in lines if line.startswith("rank "))  # gloo of torch 2.9 writes lines of its own
        return EndToEnd("shown" if code == 1 else "right", entry, lines[-1], told)
    why = lines if code == 2 else errors.strip().splitlines()
    return EndToEnd("failed", entry, (why[-1] if why else f"the script ended with {code}")[:MAX_DETAIL])


def _cache() -> Path:
    """Where trials share what Inductor compiles."""
    known = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return Path(known or Path(tempfile.gettempdir()) / f"tcverify_inductor_{os.getuid()}")


__all__ = ["is_subject", "pipeline_of", "run_script", "try_end_to_end"]
