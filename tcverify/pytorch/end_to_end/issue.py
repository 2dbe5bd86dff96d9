"""An issue for PyTorch, made of a case: what is wrong, a script that shows it with torch alone, and where it comes from."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tcverify.cases.counterexample import Counterexample
from tcverify.errors import Unsupported
from tcverify.pytorch.end_to_end.pipeline import Pipeline
from tcverify.pytorch.end_to_end.script import Way, make_script, torch_frames
from tcverify.pytorch.end_to_end.trial import pipeline_of
from tcverify.pytorch.functional_graphs import known_options
from tcverify.pytorch.subjects import SUBJECTS, TorchSubject
from tcverify.report.listing import graph_lines
from tcverify.report.markdown import code_span, fence
from tcverify.report.sanitize import plural, sanitize, sanitize_lines

#: What titles of issues begin with, by the module that defines the pass.
_PARTS = {
    "torch._inductor": "inductor",
    "torch._functorch": "AOTAutograd",
    "torch.distributed.tensor": "DTensor",
}

#: Lines of the pass that are named, the most.
MAX_LINES = 4


def to_issue(case: Counterexample) -> str:
    """Write the issue of a case.

    Raises:
        UsageError: it is of no pass of PyTorch.
    """
    pipeline = pipeline_of(case)
    subject = next(one for one in SUBJECTS.values() if one.target == case.facts.target)
    way: Way = "call" if pipeline.call and not _shown(case) else "users"
    reproduce = _reproduce(case, pipeline, way)
    return "\n".join([f"# {_title(case, subject)}", "", _description(case, pipeline, subject), "", *reproduce, "",
                      *_outcome(case), "", *_cause(case, subject), "", *_versions(case)])  # fmt: skip


def _shown(case: Counterexample) -> bool:
    return case.end_to_end is not None and case.end_to_end.state == "shown"


def _said(case: Counterexample) -> str:
    """The title of the finding, as the author of the pass would say it."""
    text = case.finding.title.removeprefix("the pass raised ")
    return text if text == case.finding.title else re.sub(r" on the graph of rank \d+$", "", text)


def _title(case: Counterexample, subject: TorchSubject) -> str:
    part = next((name for module, name in _PARTS.items() if subject.source.startswith(module)), "torch")
    name = subject.source.partition(":")[2]
    what = _said(case)
    if _shown(case) and case.end_to_end is not None:
        what = f"{case.end_to_end.detail} in {case.end_to_end.entry}"
    return sanitize(f"[{part}] {name}: {what}")


def _description(case: Counterexample, pipeline: Pipeline, subject: TorchSubject) -> str:
    program = case.program
    where = f"{code_span(subject.source)}, which {subject.what},"
    does = {
        "pass-raised": "fails on",
        "pass-timeout": "does not end on",
        "pass-crashed": "kills the process on",
    }.get(case.finding.kind, "changes what is computed by")
    lines = [f"{where} {does} a step of {plural(program.size, 'op')} on {program.world_size} ranks: "
             f"{code_span(sanitize(_said(case)))}."]  # fmt: skip
    settings = {
        name: value for name, value in known_options(pipeline.settings).items() if name != "fallback_by_default"
    }
    if pipeline.placements is not None:
        lines.append("The step runs on DTensors, beside the same ops on whole tensors.")
    elif pipeline.unreachable:
        if pipeline.call:
            lines.append(f"It is called directly below; {pipeline.entry} was not tried: {pipeline.unreachable}.")
    elif _shown(case):
        lines.append(f"It is reached through {pipeline.entry}{_with(settings)}.")
        if case.end_to_end is not None and case.end_to_end.with_defaults:
            lines.append("The same goes wrong without these settings.")
    else:
        lines.append(f"{pipeline.entry} reaches the pass{_with(settings)}; it has not been seen to show this there.")
    return " ".join(lines)


def _with(settings: Mapping[str, object]) -> str:
    told = ", ".join(code_span(f"{name} = {value!r}") for name, value in settings.items())
    return f" with {told} in `torch._inductor.config`" if told else ""


def _reproduce(case: Counterexample, pipeline: Pipeline, way: Way) -> list[str]:
    try:
        if pipeline.unreachable and not pipeline.call:
            raise Unsupported(pipeline.unreachable)
        script = make_script(case, pipeline, way)
    except Unsupported as error:
        lines = [text for _, text in graph_lines(case.program, case.finding.rank or 0)]
        return ["**To reproduce**", "", f"There is no script: {error.message}. The graph is", "", *fence(lines)]
    return [
        "**To reproduce**",
        "",
        "Save this as `script.py` and run `python script.py`. It needs torch alone, runs gloo processes on the CPU, and ends "
        "with 1 where the defect shows.",
        "",
        *fence(script.rstrip().splitlines(), "python"),
    ]


def _outcome(case: Counterexample) -> list[str]:
    """What each rank is to give, and gives."""
    if _shown(case) and case.end_to_end is not None:
        return ["**Expected and actual**", "", *fence([sanitize(line) for line in case.end_to_end.lines])]
    values = [
        f"rank {one.rank}: {one.label}{list(one.index)} expected {one.expected:.9g}, got {one.actual:.9g}"
        for one in case.values
    ]
    told = values or [f"expected: what the step computes before the pass; got: {_said(case)}"]
    return ["**Expected and actual**", "", *fence([sanitize(line) for line in told])]


def _cause(case: Counterexample, subject: TorchSubject) -> list[str]:
    """The functions of torch that made the change, or that the exception came through."""
    edits = [str(one) for one in case.made_by if one.file.startswith("torch/")]
    raised = [f"{file}:{line} in {function}" for file, line, function in torch_frames(case)[-MAX_LINES:]]
    known = edits[:MAX_LINES] or raised
    if not known:
        module, _, name = subject.source.partition(":")
        return [f"**Cause**: not narrowed down further than {code_span(module.replace('.', '/') + '.py:' + name)}."]
    what = "These lines make the change:" if edits else "The exception comes through:"
    return ["**Cause**", "", what, "", *fence(sanitize_lines("\n".join(known)))]


def _versions(case: Counterexample) -> list[str]:
    known = case.environment
    named = ", ".join(
        f"{name} {known[key]}" for name, key in (("torch", "torch"), ("Python", "python")) if key in known
    )
    return [f"**Versions**: {sanitize(', '.join([named, known.get('platform', '')]).strip(', '))}."]


__all__ = ["to_issue"]
