"""Why a node computes what it should not: which argument, which operand, which group. For people new to the program."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from tcverify.explain.diagnosis.blame import is_divided_otherwise
from tcverify.explain.diagnosis.communications import find_host_fault
from tcverify.explain.diagnosis.operands import describe_late_read, describe_swapped_operands
from tcverify.explain.diagnosis.unmatched import describe_crossed_call
from tcverify.explain.diagnosis.versions import Versions, output_node, storage_root, written_operands
from tcverify.explain.relations import Relation, relation_between
from tcverify.explain.relations.relation import IN_FULL, RelationKind
from tcverify.explain.relations.storages import is_buffer
from tcverify.ops import DEALLOCATE, RESIZE, Collective, lookup

Operands = tuple[tuple[str, Relation], ...]

#: Number of operands that are listed, and of characters of an argument.
MAX_TOLD = 3
MAX_CHARACTERS = 40

#: Relations that say by themselves what is wrong.
OWN: frozenset[RelationKind] = frozenset({"wrong-shard", "permuted", "other-rank", "addends", "dtype"})

#: What would make an output whole again that is a part of what it should be.
NEEDED = {"shard": "nothing gathers it", "partial": "nothing adds it up"}


def operands_of(of: Versions, node: fx.Node) -> Operands:
    """The operands of a node with their relations: to what the original's node of the same name reads there, if there is one."""
    read = dict(of.paired(node))
    found = []
    for operand in node.all_input_nodes:
        known = of.relations.get(operand.name)
        if is_buffer(operand) and operand in written_operands(node):
            continue  # it is not read
        if known is not None and operand in read and known.original != read[operand].name:
            name = read[operand].name
            instead = relation_between(of.program, of.before, of.after, operand.name, name, of.measure)
            sound = instead is not None and instead.explained
            known = instead if sound else replace(known, kind="other", text=f"{known.text}, instead of '{name}'")
        if known is not None:
            found.append((operand.name, known))
    return tuple(found)


def cause(
    of: Versions, node: fx.Node, relation: Relation, operands: Operands, *, output: int | None, raises: bool
) -> str:
    """Say in a few words what makes a node wrong, to follow a colon; "" where nothing can be said."""
    if raises and (why := find_freed_operand(of, node)):
        return why
    if output is not None:
        returned = output_node(of.old, output)
        meant = returned is not None and returned.name == relation.original
        return (
            (NEEDED.get(relation.kind) if meant else "")
            or _item(of, node)
            or _own_arguments(of, node, operands)
            or _together(of, node)
        )
    for reason in (
        find_host_fault(of, node)[1],
        _item(of, node),
        _own_arguments(of, node, operands),
        describe_swapped_operands(of, node),
        describe_crossed_call(of, node),
        _together(of, node),
        _loses(of, node, relation),
        _displaced(of, node, relation),
        _overwrites(of, node),
        describe_late_read(of, node),
        _other_op(of, node),
        _unfit(of, operands),
        _stale(of, node),
        _arguments(of, node, operands),
    ):
        if reason:
            return reason
    told = [(name, r) for name, r in operands if raises or not _as_expected(r, relation)]
    if told and relation.kind not in OWN:
        more = f"; and {len(told) - MAX_TOLD} more" if len(told) > MAX_TOLD else ""
        return "it reads " + "; ".join(f"'{name}', {r.text}" for name, r in told[:MAX_TOLD]) + more
    if relation.kind == "unrelated" and operands and of.namesake(node) is not None:
        return "its operands are right, so the node itself is faulty"
    return ""


def _as_expected(operand: Relation, relation: Relation) -> bool:
    """Whether an operand is what the original's is, or a part of it where the result would be a part too."""
    return operand.kind == "equal" or (operand.kind == "shard" and relation.dim is not None)


# ------------------------------------------------------------------------------------------------- the node's own doing


def _item(of: Versions, node: fx.Node) -> str:
    """Another item of a tuple."""
    namesake = of.namesake(node)
    if namesake is None or not all(n.target is operator.getitem for n in (node, namesake)):
        return ""
    mine, theirs = node.args[1], namesake.args[1]
    return "" if mine == theirs else f"it takes item {mine}, where the original's takes item {theirs}"


def _other_op(of: Versions, node: fx.Node) -> str:
    namesake = of.namesake(node)
    if namesake is None or namesake.op != "call_function" or node.op != "call_function":
        return ""
    mine, theirs = (lookup(n.target).name.split("::")[-1] for n in (node, namesake))
    return "" if mine == theirs else f"it calls {mine}, where the original's '{namesake.name}' calls {theirs}"


def _arguments(of: Versions, node: fx.Node, operands: Operands) -> str:
    """Non-tensor arguments that differ from the original's."""
    namesake = of.namesake(node)
    if namesake is None or namesake.target != node.target:
        return ""
    before, after = of.arguments(namesake, rewritten=False), of.arguments(node, rewritten=True)
    told = []
    for name in dict.fromkeys([*before, *after]):
        was, now = before.get(name), after.get(name)
        if not _holds_node(was) and not _holds_node(now) and repr(was) != repr(now):
            told.append(f"its '{name}' is {_short(now)}, where the original's is {_short(was)}")
    right = all(r.kind in IN_FULL for _, r in operands)
    if told:
        return " and ".join(told[:MAX_TOLD]) + (": what it reads is the same" if right and operands else "")
    return ""


def _own_arguments(of: Versions, node: fx.Node, operands: Operands) -> str:
    """As `_arguments`, of a node that reads what the original's reads: nothing else can be wrong with it."""
    pairs = of.paired(node)
    same = bool(pairs) and all(operand.name == read.name for operand, read in pairs)
    equal = all(r.kind == "equal" and r.original == name for name, r in operands)
    return _arguments(of, node, operands) if same and equal else ""


def find_freed_operand(of: Versions, node: fx.Node) -> str:
    """An operand whose memory has been given back."""
    for operand in node.all_input_nodes:
        for freeing in of.new.nodes:
            if freeing is node:
                break
            if freeing.op == "call_function" and lookup(freeing.target).name == DEALLOCATE:
                given = freeing.all_input_nodes[0]
                if storage_root(given) is storage_root(operand):
                    what = "" if given is operand else f" as '{given.name}'"
                    does = "writes into" if operand in written_operands(node) else "reads"
                    return f"it {does} '{operand.name}', which '{freeing.name}' has freed{what}"
        resized = [w for w in of.writes(operand, node) if lookup(w.target).name == RESIZE]
        if resized and resized[-1].args[1] == 0:
            return f"it reads '{operand.name}', which '{resized[-1].name}' has freed"
    return ""


def _holds_node(value: Any) -> bool:
    return any(isinstance(leaf, fx.Node) for leaf in pytree.tree_leaves(value))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 1]}…"


def _loses(of: Versions, node: fx.Node, relation: Relation) -> str:
    if not relation.loses or relation.original is None:
        return ""
    return f"'{relation.original}' differs between the ranks, and the discarded parts cannot be recovered"


def _overwrites(of: Versions, node: fx.Node) -> str:
    """What is read later than it is written into here, where the original leaves it alone."""
    for written in written_operands(node):
        root = storage_root(written)
        for value in of.new.nodes:
            if value is node or storage_root(value) is not root:
                continue
            reader = next((reader for reader in value.users if node in of.clobbers(value, reader)), None)
            if reader is not None:
                whom = "the program returns" if reader.op == "output" else f"'{reader.name}' reads"
                return f"it writes into '{value.name}', which {whom} later and the original does not change"
    return ""


def _displaced(of: Versions, node: fx.Node, relation: Relation) -> str:
    if relation.kind != "shard" or relation.original is None or not is_divided_otherwise(of, node):
        return ""
    homes = ", ".join(str(list(home)) for home in sorted(of.home[relation.original]))
    return f"it is divided over {list(relation.groups[of.rank])}, where the original has '{relation.original}' from {homes}"


# ----------------------------------------------------------------------------------------------------------- collectives


def _together(of: Versions, node: fx.Node) -> str:
    """A collective that puts together, or adds up, what does not go together like that."""
    call = of.called.get(node.name)
    operand = next((o for o in node.all_input_nodes if o.name in of.relations), None)
    if call is None or operand is None:
        return ""
    relation = of.relations[operand.name]
    group = list(call.communicator)
    if call.kind == "all_gather":
        return _gathers(of, call, operand, relation)
    if call.reduce_op is not None and of.namesake(node) is None:
        if relation.kind in ("equal", "reshaped", "gathered", "reduced") and _equal_everywhere(of, operand, call):
            return f"it sums '{operand.name}' over {group}, although every rank has the whole value"
        if relation.kind == "shard" and relation.groups.get(of.rank) == call.communicator:
            return f"it sums '{operand.name}' over {group}, although every rank has a different part"
    return ""


def _gathers(of: Versions, call: Collective, operand: fx.Node, relation: Relation) -> str:
    group = list(call.communicator)
    divided = relation.groups.get(of.rank)
    if relation.kind == "shard" and divided is not None:
        where = f"'{operand.name}', {relation.text}"
        if divided != call.communicator:
            return f"it gathers over {group} what is divided over {list(divided)}: {where}"
        if call.dim is not None and relation.dim is not None and call.dim % max(len(call.shape), 1) != relation.dim:
            return f"it gathers along dim {call.dim} what is divided along dim {relation.dim}: {where}"
    if relation.kind == "equal" and _equal_everywhere(of, operand, call):
        return f"it gathers '{operand.name}' over {group}, although every rank has the whole value"
    if relation.kind == "partial":
        return f"it gathers '{operand.name}' over {group}, {relation.text}, although these must be summed"
    return ""


def _equal_everywhere(of: Versions, node: fx.Node, call: Collective) -> bool:
    values = [(of.after.ranks[member].values or {}).get(node.name) for member in call.communicator]
    first = values[0]
    return all(
        isinstance(v, torch.Tensor) and isinstance(first, torch.Tensor) and torch.equal(v, first) for v in values
    )


# -------------------------------------------------------------------------------------------------------------- operands


def _unfit(of: Versions, operands: Operands) -> str:
    """Operands that do not belong together: a shard and a whole, or shards over other groups."""
    shards = [(name, r) for name, r in operands if r.kind == "shard"]
    for name, relation in shards:
        group = relation.groups.get(of.rank, ())
        for other, its in operands:
            if (
                its.kind == "equal"
                and _extent(of, other, name, relation) == _extent(of, name, name, relation) * len(group) > 0
            ):
                return f"it reads the whole of '{other}', where its other operand '{name}' is {relation.text}"
        for other, its in shards:
            if other != name and its.groups.get(of.rank, ()) != group:
                return f"its operands are parts of different divisions: '{name}' is {relation.text}; '{other}' is {its.text}"
            if other != name and _from_right(of, other, its) != _from_right(of, name, relation):
                return f"its operands are divided along different dims: '{name}' is {relation.text}; '{other}' is {its.text}"
    return ""


def _value(of: Versions, name: str) -> torch.Tensor | None:
    value = (of.after.ranks[of.rank].values or {}).get(name)
    return value if isinstance(value, torch.Tensor) else None


def _extent(of: Versions, name: str, shard: str, relation: Relation) -> int:
    """How far a value extends along the dim, counted from the right, that another one is divided along; 0 where it does not."""
    value, place = _value(of, name), _from_right(of, shard, relation)
    return value.shape[-place] if value is not None and 0 < place <= value.dim() else 0


def _from_right(of: Versions, name: str, relation: Relation) -> int:
    value = _value(of, name)
    return value.dim() - (relation.dim or 0) if value is not None else 0


def _stale(of: Versions, node: fx.Node) -> str:
    """An operand as it was before the original's is written into."""
    namesake = of.namesake(node)
    if namesake is None:
        return ""
    for operand, read in zip(node.all_input_nodes, namesake.all_input_nodes, strict=False):
        missed = [w.name for w in of.original_writes(read, namesake)]
        seen = {w.name for w in of.writes(operand, node)}
        lost = [name for name in missed if name not in seen]
        relation = of.relations.get(operand.name)
        if lost and relation is not None and relation.explained and relation.original == read.name:
            what = "the value" if relation.kind == "equal" else relation.text
            return f"it reads '{operand.name}', {what} before '{lost[0]}' writes into '{read.name}'"
    return ""
