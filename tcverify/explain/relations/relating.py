"""Relates the values of a rewritten graph, node by node, to those of the original."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from tcverify.execution import Run
from tcverify.explain.relations.buckets import bundle
from tcverify.explain.relations.chunks import chunk
from tcverify.explain.relations.combinations import Pool
from tcverify.explain.relations.grouping import groupings
from tcverify.explain.relations.layouts import RelationContext, layout
from tcverify.explain.relations.mistakes import recognise_mistake
from tcverify.explain.relations.originals import (
    Originals,
    RankValues,
    candidates_of,
    fingerprint_value,
    list_neighbours,
    originals_of,
    pool_of,
    values_by_node,
)
from tcverify.explain.relations.relation import IN_FULL, Relation, RelationKind
from tcverify.explain.relations.storages import is_order
from tcverify.explain.relations.tensors import FLOATING, Measure, Values, strip_leading_ones, values_close
from tcverify.ops import RECORD, lookup
from tcverify.program import Program

#: Original values that an unexplained one is related to by what went wrong.
MAX_TWISTED = 3

#: Kinds that explain a value only where no other does.
SECOND: frozenset[RelationKind] = frozenset({"reshaped", "transposed", "nested"})

#: Kinds of what a collective makes of a value: where the original makes the same, it is equal to that.
WHOLE: frozenset[RelationKind] = frozenset({"gathered", "reduced"})

#: Kinds that say less of a value than that it holds several, side by side.
VAGUE: frozenset[RelationKind] = frozenset({"unrelated", "partly"})


def relate(
    program: Program, before: Run, rewritten: Program, after: Run, rank: int, measure: Measure = FLOATING
) -> dict[str, Relation]:
    """Return the relation of every node of `rank`'s rewritten graph that was computed there, in graph order; not of tokens.

    A node is compared with the original's node of its name, then with what its operands lead to in the original, then with
    what has the same values. Cost is linear in nodes and ranks.
    """
    new_graph = rewritten.graphs[rewritten.ranks[rank].graph]
    new = values_by_node(new_graph, after)
    originals = originals_of(program, before, rewritten, after, rank, measure)
    found: dict[str, Relation] = {}
    for node in new_graph.nodes:
        values = new.get(node.name)
        if values is None or rank not in values or node.op == "output" or _is_token(node):
            continue
        peers = originals.peers(node.name)
        values = values if peers is None else {r: value for r, value in values.items() if r in peers}
        relation = _best(node, values, originals, found)
        if relation.kind in VAGUE and node.name not in originals.nodes:
            relation = bundle(node, new, found, lambda part, was: _part(part, was, originals)) or relation
        found[node.name] = relation
    return found


def _part(values: Values, was: Relation, originals: Originals) -> Relation | None:
    """What a part of a value is, when the part of the operand that it comes from is `was`."""
    roots = [originals.nodes[was.original]] if was.original is not None else []
    whole: Relation | None = None
    for name in list_neighbours(roots):
        relation = _explained(values, originals.values.get(name, {}), name, originals.setting)
        if relation is not None and relation.kind not in WHOLE:
            return relation
        whole = whole or relation
    return whole


def relation_between(
    program: Program, before: Run, after: Run, node: str, original: str, measure: Measure = FLOATING
) -> Relation | None:
    """How the value of one rewritten node relates to that of one original node; None where it does not."""
    new = {r.rank: r.values[node] for r in after.ranks if r.values is not None and node in r.values}
    old = {r.rank: r.values[original] for r in before.ranks if r.values is not None and original in r.values}
    setting = RelationContext(groupings(program, before, after), measure)
    return _explained(new, old, original, setting) or _twisted(new, old, original, (), setting)


def _is_token(node: fx.Node) -> bool:
    """Whether a node records that an op is complete, or orders streams: its value says nothing."""
    return node.op == "call_function" and (lookup(node.target).name == RECORD or is_order(node))


def _best(node: fx.Node, values: RankValues, originals: Originals, found: Mapping[str, Relation]) -> Relation:
    """The relation that explains a value best; else the one that says what went wrong with it.

    Of what is computed from unexplained values, less is asked: it is not where anything goes wrong first.
    """
    downstream = any(not found[o.name].explained for o in node.all_input_nodes if o.name in found)
    setting = replace(originals.setting, nested=False) if downstream else originals.setting
    candidates = list(candidates_of(node, originals, found))
    if node.name in originals.fills:
        relation = _filling(node, values, originals.fills[node.name], setting, originals)
        if relation is not None:
            return relation
    far = originals.alike.get(fingerprint_value(values.get(originals.rank)))
    second: Relation | None = None
    whole: Relation | None = None
    for name in [*candidates, far] if far is not None and far not in candidates else candidates:
        relation = _explained(values, originals.values.get(name, {}), name, setting)
        if relation is not None and not (relation.loses or relation.view or relation.kind in SECOND):
            if relation.kind == "equal" or (whole is None and relation.kind not in WHOLE):
                return relation
            whole = whole or relation
        elif relation is not None and (second is None or second.loses > relation.loses):
            second = relation
    if whole is not None:
        return whole
    if second is not None:
        return second
    part = _chunk(node, values, candidates, originals)
    if part is not None:
        return part
    step = None if downstream else _step(node, values, candidates, originals)
    if step is not None and step.explained:
        return step
    for name in candidates[: 1 if downstream else MAX_TWISTED]:
        pool = pool_of(node, name, originals, found)
        relation = _twisted(values, originals.values.get(name, {}), name, pool, setting)
        if relation is not None:
            return relation
    return _unrelated(node, values, originals) if step is None else step


def _filling(
    node: fx.Node, values: RankValues, name: str, setting: RelationContext, originals: Originals
) -> Relation | None:
    """What a communication is that should bring one value of the original: that, or what went wrong with it."""
    old = originals.values.get(name, {})
    relation = _explained(values, old, name, setting)
    if relation is not None and relation.kind in IN_FULL:
        return relation
    given = next((o.name for o in node.all_input_nodes), "")
    return _twisted(values, old, name, [(given, of_step) for _, of_step in originals.steps(name)], setting)


def _chunk(node: fx.Node, values: RankValues, candidates: Sequence[str], originals: Originals) -> Relation | None:
    """What an inserted node of a graph in host IR is a chunk of: there, loops are written out trip by trip."""
    if originals.peers(node.name) is None:
        return None
    for name in candidates:
        old = originals.values.get(name, {})
        if _all_tensors(values, old):
            found = chunk(values[originals.rank], old, name, originals.rank, originals.setting.measure)
            if found is not None:
                return found
    return None


def _step(node: fx.Node, values: RankValues, candidates: Sequence[str], originals: Originals) -> Relation | None:
    """What an inserted node is of an op that has been taken apart: one of its steps, or a multiple of one.

    Steps are many: a part of one, or one in another shape, counts only where the node calls what the step calls, or is a view.
    """
    if node.name in originals.nodes:
        return None
    op = lookup(node.target) if node.op == "call_function" else None
    setting, multiple = replace(originals.setting, nested=False), None
    for name in candidates:
        for label, of_step in originals.steps(name) if name in originals.apart else ():
            said = f"{label} in {name}"
            relation = _explained(values, of_step, said, setting)
            alike = op is not None and (op.aliases or op.name.split("::")[-1].split(".")[0] == label)
            if relation is not None and not relation.loses and (alike or relation.kind == "equal"):
                return replace(relation, kind="step", original=name)
            if multiple is None and _shapes(values) == _shapes(of_step):
                twisted = recognise_mistake(values, of_step, said, (), setting)
                if twisted is not None and twisted.kind == "scaled":
                    multiple = replace(twisted, original=name)
    return multiple


def _shapes(values: RankValues) -> dict[int, torch.Size | None]:
    return {rank: getattr(value, "shape", None) for rank, value in values.items()}


def _unrelated(node: fx.Node, values: RankValues, originals: Originals) -> Relation:
    old = originals.values.get(node.name)
    if not old:
        return Relation("unrelated", None, "unrelated to any value of the original near it")
    ranks = tuple(r for r, v in values.items() if not (r in old and _equal(v, old[r], originals.setting.measure)))
    text = f"unrelated to the original's '{node.name}'"
    mine, theirs = values.get(originals.rank), old.get(originals.rank)
    if (
        isinstance(mine, torch.Tensor)
        and isinstance(theirs, torch.Tensor)
        and strip_leading_ones(mine.shape) != strip_leading_ones(theirs.shape)
    ):
        text += f", which is {list(theirs.shape)} where it is {list(mine.shape)}"
    return Relation("unrelated", node.name, text, None, ranks if len(ranks) < len(values) else ())


# ----------------------------------------------------------------------------------------------------- whatever a value is


def _equal(value: Any, expected: Any, measure: Measure) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(expected, torch.Tensor):
        return values_close(value, expected, measure)
    if isinstance(value, (tuple, list)) and isinstance(expected, (tuple, list)):
        return len(value) == len(expected) and all(map(_equal, value, expected, [measure] * len(value)))
    return (
        type(value) is type(expected) and not isinstance(value, torch.Tensor) and (value == expected or value != value)
    )


def _explained(values: RankValues, expected: RankValues, name: str, setting: RelationContext) -> Relation | None:
    """The relation that explains one node's values by another's; tuples element by element."""
    if not values or not values.keys() <= expected.keys():
        return None
    parts = _elements(values, expected)
    if parts is not None:
        found: list[Relation] = []
        for new, old in parts:
            relation = _explained(new, old, name, setting)
            if relation is None:
                return None
            found.append(relation)
        return _combined(found, name)
    if _all_tensors(values, expected):
        return layout(values, expected, name, setting)
    if all(_equal(values[r], expected[r], setting.measure) for r in values):
        return Relation("equal", name, f"equal to the original's '{name}'")
    return None


def _combined(parts: Sequence[Relation], name: str) -> Relation:
    """The relation of a tuple whose elements have these."""
    if len({(p.kind, p.dim) for p in parts}) == 1:
        return replace(parts[0], loses=any(p.loses for p in parts))
    if not parts:
        return Relation("equal", name, f"equal to the original's '{name}'")
    text = "; ".join(f"in element {i} {p.text}" for i, p in enumerate(parts))
    return Relation("reshaped", name, text, loses=any(p.loses for p in parts))


def _twisted(
    values: RankValues, expected: RankValues, name: str, pool: Pool, setting: RelationContext
) -> Relation | None:
    """What is wrong with one node's values if they should be another's; of tuples, with the first element that is wrong."""
    if not values or not values.keys() <= expected.keys():
        return None
    parts = _elements(values, expected)
    if parts is not None:
        for i, (new, old) in enumerate(parts):
            if _explained(new, old, name, setting) is None:
                relation = _twisted(new, old, f"{name}[{i}]", pool, setting)
                return None if relation is None else replace(relation, original=name)
        return None
    return recognise_mistake(values, expected, name, pool, setting) if _all_tensors(values, expected) else None


def _elements(values: RankValues, expected: RankValues) -> list[tuple[RankValues, RankValues]] | None:
    """The elements of tuples of one length, by rank; None for anything else."""
    lengths = {len(v) if isinstance(v, (tuple, list)) else -1 for side in (values, expected) for v in side.values()}
    if len(lengths) != 1 or -1 in lengths:
        return None
    return [({r: v[i] for r, v in values.items()}, {r: v[i] for r, v in expected.items()}) for i in range(max(lengths))]


def _all_tensors(values: RankValues, expected: RankValues) -> bool:
    return all(isinstance(value, torch.Tensor) for side in (values, expected) for value in side.values())
