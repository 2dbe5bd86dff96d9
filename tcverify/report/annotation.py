"""A finding at a line of the pass, as editors and code review show it."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from tcverify.cases.baseline import pass_reference
from tcverify.cases.counterexample import Counterexample
from tcverify.cases.fingerprint import fingerprint_of, raising_frame
from tcverify.registry.pipelines import stage_targets
from tcverify.report.block import make_block
from tcverify.report.sanitize import sanitize
from tcverify.system.files import source_name


@dataclass(frozen=True, slots=True)
class Annotation:
    """The contents of an annotation. Texts are free of control characters, see `sanitize`.

    Attributes:
        file, line: of the pass: the code of the wrong rewrite, else of the exception, else the definition of the pass;
            of the counterexample for a pass without a file. Relative to the current directory if the file is below it.
        title: kind and pass.
        message: lines: the cause, the first divergence, how to replay the case.
        fingerprint: shared by findings of the same cause; "" if unknown.
        error: whether the finding fails the run; hygiene findings and those written to a baseline do not.
    """

    file: str
    line: int
    title: str
    message: tuple[str, ...]
    fingerprint: str
    error: bool


def annotate(case: Counterexample, path: Path, *, accepting: bool = False) -> Annotation:
    """Return the annotation of a counterexample, without parts that cannot be determined.

    Args:
        path: its file.
        accepting: whether findings are being written to a baseline.
    """
    finding = case.finding
    file, line = str(path), 1
    message = [sanitize(finding.title)]
    fingerprint = ""
    try:
        file, line = _place(case) or (file, line)
        block = make_block(case, path)
        message += [f"First divergence: {block.divergence}"] if block.divergence else []
        message += [f"Root cause: {block.blame}"] if block.blame else []
        message += [f"Replay: {block.reproduce[0]}"] if block.reproduce else []
        fingerprint = sanitize(f"{pass_reference(case.facts)}: {fingerprint_of(case)}")
    except Exception:  # noqa: BLE001 - what explains a finding must not keep it from being told
        pass
    title = sanitize(f"{finding.kind} in {case.facts.name}")
    error = finding.severity == "error" and not accepting
    return Annotation(sanitize(file), line, title, tuple(message), fingerprint, error)


def _place(case: Counterexample) -> tuple[str, int] | None:
    if case.made_by:
        return case.made_by[0].file, case.made_by[0].line
    frame = raising_frame(case.finding.detail) if case.finding.kind == "pass-raised" else None
    if frame is not None:
        return source_name(frame["file"]), int(frame["line"])
    stages = stage_targets(case.facts.target) if case.facts.target else []
    blamed = [one for one in stages if one.endswith(str(case.finding.data.get("stage")))]
    return _definition((blamed or stages)[0]) if stages else None


def _definition(reference: str) -> tuple[str, int] | None:
    """File and line of what "module:attribute" or "path/file.py:attribute" names; None if there is no such file."""
    module, _, attribute = reference.rpartition(":")
    file = Path(module).resolve() if module.endswith(".py") else _module_file(module)
    if file is None or not file.is_file():
        return None
    name = re.escape(attribute.split(".")[0])
    text = file.read_text(encoding="utf-8", errors="replace")
    found = re.search(rf"^(?:(?:async )?def|class) {name}\b|^{name}\s*[:=]", text, re.MULTILINE)
    return source_name(str(file)), text.count("\n", 0, found.start()) + 1 if found is not None else 1


def _module_file(module: str) -> Path | None:
    """The file of a module, found without importing its packages: the pass runs in another process."""
    places = [str(Path.cwd()), *sys.path]
    spec = None
    for part in module.split("."):
        spec = PathFinder.find_spec(part, places)
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or ())
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


__all__ = ["Annotation", "annotate"]
