"""Decides whether two findings are the same, independent of the programs that show them.

A case's id contains its program, and two seeds shrink one defect to two programs. So a finding is recognised by the reference of
the pass, its kind and a fingerprint: one line that people can read, made of what stays when the program changes.

- Findings about values: the op of the first node whose value the original does not explain, how that value relates to the
  original's, and how those that it reads do. The title ("output 1 is wrong on ranks 0, 1") says where the defect surfaces, which
  is a matter of the program, so it is left out.
- A pass that raises: the function of the pass that raised last, the type and the message of the exception.
- All else: the title, and the op of the node to blame where the title does not name it.

In each of them names of nodes become the ops of these nodes, numbers and lists of them become #, also at the ends of names in the
message of an exception. Ops that are forms of one
another count as one: norms, with or without a fused add; and collectives, ops in place and others where streams or memory in use
are concerned. A shard of a wrong position is the same whatever op takes it. The stage of a pipeline belongs to a fingerprint;
options of the pass, the mesh and the program do not.

Measured on shrunk cases of 17 planted defects, five seeds each, which show as 22 pairs of defect and kind: 21 have one
fingerprint, one has two. With ops by their names 9 had several, and with the ops that come and go in the rewrite 13. Two
defects that take a wrong shard share a fingerprint, and two that return a local value; all others are told apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from torch import fx

from tcverify.cases.counterexample import Counterexample
from tcverify.explain.diagnosis import Divergence, diagnose
from tcverify.explain.relations.relation import RelationKind
from tcverify.ops import lookup, qualified_name
from tcverify.program import Finding, Program

#: Kinds that the first divergence explains, if there is one.
_OF_VALUES = ("wrong-value", "rewritten-raises")

#: Checks to which it matters what an op does to streams and storage, not which op it is.
_OF_STREAMS = ("happens-before", "interleavings", "schedule")

#: Longest fingerprint; messages of passes may be of any length.
MAX_LENGTH = 300

_NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d.]*(?:e[-+]?\d+)?")
#: Names that compilers number, but for those of dtypes.
_NUMBERED = re.compile(r"\b(?!b?float\d|u?int\d|complex\d)([A-Za-z][A-Za-z_]*?)_?\d+(?:_\d+)*\b")
_MORE_NUMBERS = re.compile(r"#(?:(?:, | × |x)#)+")
_QUOTED = re.compile(r"'([^']*)'")
_FRAME = re.compile(r'^ *File "(?P<file>[^"]*)", line (?P<line>\d+), in (?P<function>\S+)', re.MULTILINE)
_INSTALLED = re.compile(r"site-packages|dist-packages|/lib/python|^<")
_OURS = f"{Path(__file__).parents[1]}/"
_CALLS = re.compile(r"rank # calls \w+ while rank # calls \w+")

#: Kinds of findings to which it matters in which way an op touches memory, not which op it is.
_OF_MEMORY = frozenset({"async-race"})

#: Relations that one defect may show on one program and not on another: they depend on sizes and values.
_OF_SIZES: frozenset[RelationKind] = frozenset({"sum", "addends", "partly", "not-finite"})
_STAGE = re.compile(r" \(stage [^)]*\)$")
_ON_RANK = re.compile(r" on the graph of rank \d+$")


def fingerprint_of(case: Counterexample) -> str:
    """Return the fingerprint of the finding that a case is kept for."""
    return fingerprint(case.program, case.rewritten, case.finding)


def fingerprint(program: Program, rewritten: Program | None, finding: Finding) -> str:
    """Return what identifies a finding besides its pass and kind, in one line. Never raises for any program.

    Args:
        rewritten: the program after the pass, if it can be serialized.
    """
    ops = _ops(program, rewritten, by_role=finding.check in _OF_STREAMS or finding.kind in _OF_MEMORY)
    parts = [_identity(program, rewritten, finding, ops)]
    stage = finding.data.get("stage")
    if stage:
        parts.append(f"stage {stage}")
    text = "; ".join(" ".join(part.split()) for part in parts)
    return text if len(text) <= MAX_LENGTH else f"{text[:MAX_LENGTH]} …"


def _identity(program: Program, rewritten: Program | None, finding: Finding, ops: Mapping[str, str]) -> str:
    title = _STAGE.sub("", finding.title)
    if finding.kind in _OF_VALUES:
        first = diagnose(program, rewritten, finding).first
        if first is not None:
            return _divergence(first, ops)
    if finding.kind == "pass-raised":
        message = _normalised(_NUMBERED.sub(r"\1#", _unnamed(_ON_RANK.sub("", title), ops)), {})
        frame = raising_frame(finding.detail)
        return f"{message}, in {frame['function'] if frame is not None else 'a function'}"
    text = _normalised(title, ops)
    if finding.kind == "collective-mismatch":  # which ops meet is a matter of what the program calls next
        text = _CALLS.sub("ranks call different ops", text)
    told = finding.node is None or f"'{finding.node}'" in title or finding.kind == "collective-mismatch"
    return text if told else f"{text}, at {ops.get(str(finding.node), 'a node')}"


def _divergence(first: Divergence, ops: Mapping[str, str]) -> str:
    if first.aspect:
        return f"{ops.get(first.node, 'a node')}: {first.aspect}"
    kind = "unrelated" if first.relation.kind in _OF_SIZES else first.relation.kind
    reads = sorted({relation.kind for _, relation in first.operands} - {"equal"})
    op = "a value" if kind == "wrong-shard" else ops.get(first.node, "a node")
    what = "raises" if first.raises else f"is {kind}"
    returned = ", returned as it is" if first.output is not None else ""
    return f"{op} {what}{f', reads {chr(44).join(reads)}' if reads else ''}{returned}"


def raising_frame(traceback: str) -> re.Match[str] | None:
    """Return `file`, `line` and `function` of the innermost frame of the pass: of no installed package, not of Python and not of
    ours. A pass that is installed itself has none: then the innermost of all but ours."""
    theirs = [frame for frame in _FRAME.finditer(traceback) if not frame["file"].startswith(_OURS)]
    own = [frame for frame in theirs if not _INSTALLED.search(frame["file"])]
    found = own or theirs
    return found[-1] if found else None


def _ops(program: Program, rewritten: Program | None, *, by_role: bool) -> dict[str, str]:
    """The op of every node of both versions, by the node's name; the rewritten version's where both have the name."""
    versions = [program, rewritten] if rewritten is not None else [program]
    return {node.name: _op(node, by_role) for one in versions for graph in one.graphs for node in graph.nodes}


def _op(node: fx.Node, by_role: bool) -> str:
    if node.op in ("placeholder", "output"):
        return "input" if node.op == "placeholder" else "return"
    name = qualified_name(node.target) if node.op == "call_function" else str(node.target)
    short = name.split("::")[-1].split(".")[0]
    if by_role and not short.startswith("_internal"):
        if node.op == "call_function" and lookup(node.target).collective:
            return "collective"
        return "in-place op" if short.endswith("_") else "op"
    return "norm" if "norm" in short else short


def _unnamed(text: str, ops: Mapping[str, str]) -> str:
    """Name nodes by their ops in the message of an exception, which quotes as it likes. Names of inputs, often words, stay."""
    return re.sub(r"\w+", lambda word: word[0] if ops.get(word[0], "input") == "input" else ops[word[0]], text)


def _normalised(text: str, ops: Mapping[str, str]) -> str:
    named = _QUOTED.sub(lambda quoted: f"'{ops.get(quoted[1], quoted[1])}'", text)
    counted = _MORE_NUMBERS.sub("#", _NUMBER.sub("#", named))
    return re.sub(r"\branks #", "rank #", counted)


__all__ = ["fingerprint", "fingerprint_of", "raising_frame"]
