"""The law that an op would have to satisfy for two programs to be equal, if only its signature is known.

The original and its rewrite differ. If the original makes every call of such an op too, on tensors of the same shapes,
this is a defect, unless a law explains it; so is a wrong output that depends on no such op. If a call gets tensors of
other shapes, or is missing, both may be equal by a law of the op: a norm is computed row by row, so the norm of a shard
is the shard of the norm. Laws are tried: both versions run with the op replaced by a function that satisfies the law.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial, reduce

from torch import fx
from torch.utils import _pytree as pytree

from tcverify.checks.values.equivalence import differences
from tcverify.errors import UnsupportedOp
from tcverify.execution import Comparison, Lockstep
from tcverify.ops import lookup
from tcverify.ops.uninterpreted import OpCall, record_calls
from tcverify.program import Doubt, Finding, Program
from tcverify.registry.op_laws import OpLaw, law_of, supposing

#: Largest number of laws that are tried.
_MOST = 16


def law_needed(original: Program, rewritten: Program) -> Doubt | None:
    """Name the law and the op on which the equality of two differing programs depends; None if there is no such law."""
    graphs = (*original.graphs, *rewritten.graphs)
    if not any(n.op == "call_function" and lookup(n.target).uninterpreted for graph in graphs for n in graph.nodes):
        return None
    lockstep = Lockstep()
    before, after = _calls(original), _calls(rewritten)
    if not before and not after:
        return None
    new = [call for call in after if not _known(call, before)]
    gone = [call for call in before if not _known(call, after)]
    for number, laws in enumerate(_suppositions(before, after, new)):
        if number == _MOST:
            break
        if _agree(original, rewritten, laws, lockstep):
            return Doubt("law-needed", _describe_laws(laws, before, new))
    if (not new and not gone) or _wrong_beside(original, rewritten, lockstep):
        return None
    call = (new or gone)[0]
    what = (
        f"the rewrite calls {_call(call)}, the original never" if new else f"the rewrite no longer calls {_call(call)}"
    )
    hint = next(filter(None, (_hint(old, call) for old in before)), None)
    mend = "define it with tcverify.register_dialect"
    if hint is not None:
        mend += f", or a law: with {_options(call.name, hint)} the versions still differ"
    return Doubt("law-needed", f"{what}, and only the signature of {call.name} is known; {mend}")


def _wrong_beside(original: Program, rewritten: Program, lockstep: Lockstep) -> bool:
    """Whether a wrong output depends on no such op in either version: this is a defect, whatever the ops do."""
    comparison = lockstep.compare(original, rewritten)
    labels = dict.fromkeys((delta.label, delta.rank) for delta in comparison.deltas)
    for label, rank in labels:
        found = _OUTPUT.fullmatch(label)
        graphs = [program.graphs[program.ranks[rank].graph] for program in (original, rewritten)]
        if found is None or any(_depends(graph, int(found[1])) for graph in graphs):
            continue
        alone = replace(comparison, deltas=[delta for delta in comparison.deltas if delta.label == label])
        probe = partial(lockstep.probe, original, comparison.original)
        if any(isinstance(one, Finding) for one in differences(alone, probe)):
            return True
    return False


_OUTPUT = re.compile(r"output (\d+)")


def _depends(graph: fx.Graph, output: int) -> bool:
    """Whether an output depends on an op of which only the signature is known, or may depend on one."""
    if any(lookup(n.target).uninterpreted and lookup(n.target).aliases for n in graph.nodes if n.op == "call_function"):
        return True  # values that it writes are read through its operands
    leaves = pytree.tree_leaves(graph.output_node().args[0])
    if output >= len(leaves) or not isinstance(leaves[output], fx.Node):
        return True
    waiting, seen = [leaves[output]], set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "call_function" and lookup(node.target).uninterpreted:
            return True
        waiting += node.all_input_nodes
    return False


def _known(call: OpCall, others: list[OpCall]) -> bool:
    """Whether a call is among others, up to values and arguments that are not tensors, or a declared law relates it to one on
    other sizes."""
    same = [other for other in others if other.name == call.name]
    if any(other.shapes == call.shapes for other in same):
        return True
    declared = law_of(call.name)
    if declared is None:
        return False
    laws = filter(None, (_hint(other, call) for other in same))
    return any(declared.pointwise == () or all(row in declared.rows for row in law.rows) for law in laws)


def _calls(program: Program) -> list[OpCall]:
    with record_calls() as calls:
        Lockstep().run(program)
    return list(calls)


def _suppositions(before: list[OpCall], after: list[OpCall], new: list[OpCall]) -> Iterator[dict[str, OpLaw]]:
    """Laws to try, by op: those that the shapes of new calls suggest first."""
    hinted: dict[str, list[OpLaw]] = {}
    for call in new:
        for old in before:
            law = _hint(old, call)
            if law is not None and law not in hinted.setdefault(call.name, []):
                hinted[call.name].append(law)
    first = {name: laws[0] for name, laws in hinted.items() if laws}
    if first:
        yield first
        yield {name: replace(law, linear="") for name, law in first.items()}
    for name, laws in hinted.items():
        for law in laws[1:]:
            yield {**first, name: law}
    for call in {call.name: call for call in after}.values():
        yield {**first, call.name: OpLaw(linear="")}
        yield {**first, call.name: OpLaw(pointwise=())}
        dims = len(call.shapes[0][1]) if call.shapes else 0
        for dim in range(min(dims, 3)):
            yield {**first, call.name: OpLaw(rows=((("", dim),),))}


def _hint(old: OpCall, new: OpCall) -> OpLaw | None:
    """The law by which a call on other shapes computes a part of the old result: rows along the dims that differ."""
    if old.key != new.key or [name for name, _ in old.shapes] != [name for name, _ in new.shapes]:
        return None
    rows: dict[tuple[int, int], dict[str, int]] = {}
    for (name, was), (_, now) in zip(old.shapes, new.shapes, strict=True):
        if len(was) != len(now):
            return None
        for dim, sizes in enumerate(zip(was, now, strict=True)):
            if sizes[0] != sizes[1]:
                rows.setdefault(sizes, {})[name] = dim
    if not rows:
        return None
    every = {name for name, _ in new.shapes}
    short = [
        (("", next(iter(row.values()))),) if len(set(row.values())) == 1 and set(row) == every else tuple(row.items())
        for row in rows.values()
    ]
    return OpLaw(rows=tuple(short))


def _agree(original: Program, rewritten: Program, laws: Mapping[str, OpLaw], lockstep: Lockstep) -> bool:
    known = {name: _both(law_of(name), law) for name, law in laws.items()}
    with supposing(known):
        try:
            comparison: Comparison = lockstep.compare(original, rewritten)
            if not (comparison.original.finished and comparison.rewritten.finished):
                return False
            probe: Callable[[], dict[str, float]] = lambda: lockstep.probe(original, comparison.original)  # noqa: E731
            return not differences(comparison, probe)  # nor doubts: an inconclusive comparison is not agreement
        except UnsupportedOp:
            return False


def _both(declared: OpLaw | None, law: OpLaw) -> OpLaw:
    if declared is None:
        return law
    rows = reduce(lambda found, row: found if row in found else (*found, row), law.rows, declared.rows)
    return OpLaw(rows, law.pointwise or declared.pointwise, law.linear if law.linear is not None else declared.linear)


def _describe_laws(laws: Mapping[str, OpLaw], before: list[OpCall], new: list[OpCall]) -> str:
    told = " and ".join(f"{name} is {text}" for name, law in laws.items() for text in law.texts)
    options = " ".join(_options(name, law) for name, law in laws.items())
    given = next((call for call in new if call.name in laws), None)
    old = next((call for call in before if given is not None and call.name == given.name), None)
    where = (
        f" (it is given {_shapes(given)}; in the original, {_shapes(old)})"
        if given is not None and old is not None
        else ""
    )
    return f"the rewrite is right only if {told}{where}; if so, use {options}"


def _options(name: str, law: OpLaw) -> str:
    return " ".join(f"--op-law '{name}={text}'" for text in law.texts)


def _call(call: OpCall) -> str:
    return f"{call.name} {_shapes(call)}"


def _shapes(call: OpCall) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in call.shapes)


__all__ = ["law_needed"]
