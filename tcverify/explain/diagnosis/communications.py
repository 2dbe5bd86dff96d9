"""Why the result of a communication is wrong: its order of ranks, its root, its dim, …, compared with the layouts of
the resharding that it implements."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from tcverify.explain.diagnosis.buffers import (
    describe_unwritten,
    describe_wrong_place,
    destination,
    original_of_allocation,
)
from tcverify.explain.diagnosis.versions import Versions, storage_root
from tcverify.explain.relations.storages import allocates
from tcverify.ops import Collective, Layout, Resharding, lookup
from tcverify.ops.collective import CollectiveKind
from tcverify.ops.dialects.multidevice import REDUCE, SET

#: Communications whose members hold parts before, and those that leave parts.
GATHERING: frozenset[CollectiveKind] = frozenset({"all_gather", "gather"})
SCATTERING: frozenset[CollectiveKind] = frozenset({"scatter", "reduce_scatter"})
REDUCING: frozenset[CollectiveKind] = frozenset({"all_reduce", "reduce_scatter", "reduce"})


def resharding_asked_for(node: fx.Node | None) -> Resharding | None:
    """What a `set` or `reduce` of the original asks for; None for anything else."""
    if node is None or node.op != "call_function" or (name := lookup(node.target).name) not in (SET, REDUCE):
        return None
    dim, op, *rest = node.args[1:6] if name == REDUCE else (None, None, *node.args[1:4])
    source, target, shape = rest
    return Resharding(Layout.parse(str(source)), Layout.parse(str(target)), tuple(shape), dim, op)  # type: ignore[arg-type]


def fault(of: Versions, node: fx.Node) -> tuple[str, str]:
    """What is wrong with a communication: in a word or two, and as what follows a colon; ("", "") if nothing is known."""
    call = of.called.get(node.name)
    into = destination(node) if call is not None else None
    name = original_of_allocation(of, storage_root(into)) if into is not None else None
    stood = of.old_nodes.get(name or "")
    made = resharding_asked_for(stood)
    if call is None or stood is None or made is None:
        found = [("neutral element", _neutral(of, node))]
    else:
        whose = _operand(of, stood, made)
        found = [
            ("order of ranks", _order(call, made, whose, stood.name)),
            ("team", _left_out(call, made, whose)),
            ("root", _root(call, made, whose, stood.name)),
            ("dim", _dim(call, made, whose, stood.name)),
            ("reduction", _reduction(call, made)),
            ("sender", _partner(of, call, made, whose)),
        ]
    return next(((aspect, text) for aspect, text in found if text), ("", ""))


def find_host_fault(of: Versions, node: fx.Node) -> tuple[str, str]:
    """Of host IR: what is wrong with a communication, with what is written into an allocation, or that nothing is.

    In a word or two, and as what follows a colon; see `fault`.
    """
    if not of.hosts:
        return "", ""
    if allocates(node) and (missing := describe_unwritten(of, node)):
        return "unwritten memory", missing
    aspect, text = fault(of, node)
    if not text and (text := describe_wrong_place(of, node)):
        aspect = "place"
    return aspect, text


def _operand(of: Versions, stood: fx.Node, made: Resharding) -> str:
    """The operand of a `set` or `reduce`, by its name: a rank outside its mesh has none itself."""
    holder = of.program.ranks[made.source.mesh.ranks[0]]
    there = next((n for n in of.program.graphs[holder.graph].nodes if n.name == stood.name), stood)
    return f"'{there.args[0]}'" if isinstance(there.args[0], fx.Node) else f"what '{stood.name}' reads"


def _order(call: Collective, made: Resharding, whose: str, name: str) -> str:
    """Shards are identified by position in the team."""
    for kinds, layout, verb, what in (
        (GATHERING, made.source, "gathers", whose),
        (SCATTERING, made.target, "divides", f"'{name}'"),
    ):
        if call.kind in kinds:
            slices = [team for dim in range(layout.mesh.ndim) for team in layout.mesh.slices(dim)]
            for team in slices:
                members = [rank for rank in call.communicator if rank in team]
                if sorted(members) == sorted(team) and members != list(team):
                    return f"it {verb} in the order of ranks {members}, where the layout of {what} has {list(team)}"
    return ""


def _left_out(call: Collective, made: Resharding, whose: str) -> str:
    if call.kind not in GATHERING | REDUCING or made.source.mesh.ndim > 1 or not made.source.is_sharded:
        return ""
    missing = [rank for rank in made.source.mesh.ranks if rank not in call.communicator]
    if not missing:
        return ""
    verb = "holds" if len(missing) == 1 else "hold"
    return f"its team {list(call.communicator)} lacks {_ranks(missing)}, which {verb} a part of {whose}"


def _root(call: Collective, made: Resharding, whose: str, name: str) -> str:
    if call.root is None:
        return ""
    if call.kind in ("broadcast", "scatter") and call.root not in made.source.mesh:
        return f"its root is rank {call.root}, which has no part of {whose}: its mesh is {made.source.mesh}"
    if call.kind in ("gather", "reduce") and call.root not in made.target.mesh:
        return f"its root is rank {call.root}, which gets no part of '{name}': its mesh is {made.target.mesh}"
    return ""


def _dim(call: Collective, made: Resharding, whose: str, name: str) -> str:
    if call.dim is None or len(call.shape) != len(made.shape):
        return ""
    if call.kind in GATHERING:
        layout, dims, what, verb = made.source, list(made.source.sharding), whose, "gathers"
    elif call.kind in SCATTERING:
        shift = made.dim if made.dim is not None else len(made.shape)
        dims = [d if d is None or d < shift else d + 1 for d in made.target.sharding]
        layout, what, verb = made.target, f"'{name}'", "divides"
    else:
        return ""
    if call.dim in dims:
        return ""
    counted = "" if made.dim is None else ", counted in the operand"
    divided = next((dim for dim in dims if dim is not None), None)
    return f"it {verb} along dim {call.dim}, where the layout '{layout}' of {what} divides dim {divided}{counted}"


def _reduction(call: Collective, made: Resharding) -> str:
    op = made.reduce_op
    if call.reduce_op is None or op is None or call.reduce_op == op or (op == "avg" and call.reduce_op == "sum"):
        return ""
    return f"it reduces by '{call.reduce_op}', where the original reduces by '{op}'"


def _partner(of: Versions, call: Collective, made: Resharding, whose: str) -> str:
    """Who sends to whom, between meshes of one size."""
    if call.kind != "send_recv" or call.root is None or of.rank not in made.target.mesh:
        return ""
    if len(made.source.mesh.ranks) != len(made.target.mesh.ranks):
        return ""
    partner = made.source.mesh.ranks[made.target.mesh.ranks.index(of.rank)]
    if partner == call.root:
        return ""
    return f"it comes from rank {call.root}, where rank {partner} has this part of {whose}"


def _neutral(of: Versions, node: fx.Node) -> str:
    """Of what a root gives that has no part of its own: that it changes the result."""
    for user in node.users:
        call = of.called.get(user.name)
        into = destination(user) if call is not None and call.kind in REDUCING else None
        made = (
            resharding_asked_for(of.old_nodes.get(original_of_allocation(of, storage_root(into)) or ""))
            if into is not None
            else None
        )
        value = (of.after.ranks[of.rank].values or {}).get(node.name)
        if made is None or made.dim is None or of.rank in made.source.mesh or not isinstance(value, torch.Tensor):
            continue
        given = f"{value.reshape(-1)[0].item():.6g}" if value.numel() else "nothing"
        return (
            f"rank {of.rank} has no part to reduce by '{made.reduce_op}', and gives {given}, which changes the result"
        )
    return ""


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


__all__ = ["fault", "find_host_fault", "resharding_asked_for"]
