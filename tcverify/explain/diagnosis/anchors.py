"""Anchors that stand where a runtime binds them to another op than the one whose values they gate or record."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import fx

from tcverify.explain.diagnosis.divergence import Divergence
from tcverify.explain.diagnosis.versions import Versions, written_operands
from tcverify.explain.relations import Relation
from tcverify.ops import RECORD, WAIT, TensorSpec, lookup


def find_misplaced_anchor(of: Versions, name: str | None) -> Divergence | None:
    """The anchor that binds an op by position alone, or the first one that binds it by data flow alone; None for neither.

    A runtime gives pending waits to the next op that is issued; an op without any runs on the stream of the record behind it.

    Args:
        name: of the op that comes to harm.
    """
    node = of.new_nodes.get(name or "")
    if node is None or _is(node, WAIT, RECORD):
        return None
    nodes = list(of.new.nodes)
    place = nodes.index(node)
    waits = [n for n in _until_work(reversed(nodes[:place])) if _is(n, WAIT)]
    records = [] if waits else _behind(nodes[place + 1 :])
    own = _gates(node)
    for anchor in [*waits[:1], *records]:
        if anchor not in own and not (_is(anchor, RECORD) and _recorded(anchor) is node):
            return _divergence(of, anchor, f"it stands {'before' if _is(anchor, WAIT) else 'behind'} '{node.name}'")
    for gate in own:
        between = next((n for n in nodes[nodes.index(gate) + 1 : place] if _is_work(n)), None)
        if between is not None:
            return _divergence(of, gate, f"'{between.name}' stands between it and '{node.name}', which reads it")
    for record in nodes[place + 1 :]:
        if _is(record, RECORD) and _recorded(record) is node and record not in records:
            issued = next((n for n in reversed(nodes[: nodes.index(record)]) if _is_work(n)), node)
            return _divergence(of, record, f"it stands behind '{issued.name}'")
    return None


def _divergence(of: Versions, anchor: fx.Node, why: str) -> Divergence:
    if _is(anchor, WAIT):
        readers = ", ".join(f"'{user.name}'" if user.op != "output" else "the outputs" for user in anchor.users)
        text = f"a wait for {readers}" if readers else "a wait whose result is unused"
    else:
        recorded = _recorded(anchor)
        text = "a record of no op" if recorded is None else f"a record of '{recorded.name}'"
    return Divergence(anchor.name, Relation("misplaced", None, text), None, (), cause=why, rank=of.rank)


def _is(node: fx.Node, *names: str) -> bool:
    return node.op == "call_function" and lookup(node.target).name in names


def _is_work(node: fx.Node) -> bool:
    """Whether a node is issued to a stream: no anchor, no view, nothing that computes mere numbers."""
    if node.op != "call_function" or _is(node, WAIT, RECORD):
        return False
    if lookup(node.target).aliases and next(written_operands(node), None) is None:
        return False
    return isinstance(node.meta.get("val"), (TensorSpec, tuple, list))


def _until_work(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    for node in nodes:
        if _is_work(node):
            return
        yield node


def _behind(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The record that binds the op issued before these nodes by position, if there is one."""
    anchor = next((node for node in _until_work(nodes) if _is(node, WAIT, RECORD)), None)
    return [anchor] if anchor is not None and _is(anchor, RECORD) else []


def _gates(node: fx.Node) -> list[fx.Node]:
    """The waits that an op reads through, nested ones too."""
    found: list[fx.Node] = []
    todo = list(node.all_input_nodes)
    while todo:
        operand = todo.pop(0)
        if _is(operand, WAIT) and operand not in found:
            found.append(operand)
            todo += [a for a in operand.args[:1] if isinstance(a, fx.Node)]
    return found


def _recorded(record: fx.Node) -> fx.Node | None:
    """The op that a record completes by data flow."""
    node = next(iter(record.all_input_nodes), None)
    while node is not None and not _is_work(node):
        node = next(iter(node.all_input_nodes), None)
    return node
