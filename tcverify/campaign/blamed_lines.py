"""Which lines of the pass made the wrong rewrite that a finding shows."""

from __future__ import annotations

import linecache
import re

from tcverify.application import Subject, Watch
from tcverify.application.edit_log import EditPlace
from tcverify.cases.counterexample import Counterexample, EditingLine
from tcverify.explain.diagnosis import diagnose
from tcverify.program import NotSerialisable
from tcverify.system.files import source_name

#: Lines that are kept of one finding.
MOST = 8


def find_editing_lines(subject: Subject, case: Counterexample) -> tuple[EditingLine, ...]:
    """Apply the pass once more, and return the lines that edited the nodes that a finding is about, those of the node that it
    names first; empty where nothing is known of them: the finding names no node, or it is not recorded what the pass reaches.
    """
    try:
        pair = subject.start(case.program, deep=case.deep, watch=Watch(edits=True))()
    except NotSerialisable:
        return ()
    if not pair.trace.edited or case.rewritten is None:
        return ()
    diagnosis = diagnose(case.program, case.rewritten, case.finding)
    edited = pair.trace.edited[min(diagnosis.rank, len(pair.trace.edited) - 1)]
    first = diagnosis.first
    names = [case.finding.node, first.node if first is not None else None]
    if first is not None:
        names += ["output"] if first.output is not None else []
        names += [operand for operand, _ in first.operands]
    lines = dict.fromkeys(
        EditingLine(name, place.what, source_name(place.file), place.line, place.function, _caller(place))
        for name in dict.fromkeys(names)
        if name is not None
        for place in edited.get(name, ())
    )
    return tuple(lines)[:MOST]


def _caller(place: EditPlace) -> str:
    """The line that called the function of an edit, if the pass calls that function at several lines."""
    if not place.caller_file:
        return ""
    name = re.escape(place.function.rpartition(".")[2])
    source = "".join(line for file in {place.file, place.caller_file} for line in linecache.getlines(file))
    if len(re.findall(rf"(?<!def )\b{name}\(", source)) < 2:
        return ""
    return f"{source_name(place.caller_file)}:{place.caller_line} in {place.caller_function}"


__all__ = ["find_editing_lines"]
