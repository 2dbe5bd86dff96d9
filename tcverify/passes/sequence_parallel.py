"""Sequence parallelism: norms behind an all_reduce work on this rank's tokens only.

P1: all_reduce → [region_begin | view between [S, H] and [1, S, H]]* → rms_norm | add_rms_norm becomes
reduce_scatter → the same chain on the shard → norm → all_gather. Other readers of the all_reduce keep it.

Placements decide, never shapes. The precondition is that of `placements`: the ranks run one graph up to rank constants. Then
all members of a group take the same decision, and what is inserted stands at the same place of the program on each.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import fx

from tcverify.ops import TensorSpec, resolve
from tcverify.passes.base import Pass
from tcverify.passes.editing import annotate, arguments, known_spec, op_name, set_argument
from tcverify.passes.placements import Placements, propagate
from tcverify.passes.sequence_layout import (
    ALL_GATHER,
    ALL_REDUCE,
    NORM_OPERANDS,
    REGION_BEGIN,
    VIEWS,
    Match,
    Reduction,
    keeps_tokens,
    other_addend,
    reads_as_source,
    shape_of,
    token_dim,
    unbatched,
)
from tcverify.program import Contract


class SequenceParallel(Pass):
    """Runs norms behind an all_reduce on the rank's shard of the tokens.

    Args:
        patterns: which rewrites run, separated by commas.
        options: those of `Pass`.
    """

    name = "sequence_parallel"
    contract: ClassVar[Contract] = Contract(idempotent=True)
    PATTERNS = ("P1",)

    def __init__(self, *, patterns: str = "P1", **options: Any) -> None:
        super().__init__(**options)
        self.patterns = self._choice("patterns", patterns, self.PATTERNS)

    def rewrite(self, graph: fx.Graph) -> Iterable[fx.Node]:
        """Analyse first, then rewrite. See `Pass.rewrite`."""
        facts = propagate(graph)
        shards: dict[fx.Node, fx.Node] = {}
        addends: list[fx.Node] = []
        if "P1" in self.patterns:
            for match in self.matches(graph, facts):
                addends += self.apply(graph, match, shards, facts)
                self.rewrites["P1"] += 1
        return [*shards, *addends]

    # ------------------------------------------------------------------------------------------------------ analysis

    def matches(self, graph: fx.Graph, facts: Placements) -> list[Match]:
        """Find the norms that P1 rewrites, in graph order."""
        chains = self.chains(graph, facts)
        if not chains:
            return []
        found = [match for node in graph.nodes if (match := self.match(node, chains, facts)) is not None]
        movable = self.movable(chains, {match.norm: match for match in found})
        return [match for match in found if match.source in movable]

    def chains(self, graph: fx.Graph, facts: Placements) -> dict[fx.Node, Reduction]:
        """Map every value that is an all_reduce, seen through markers and views that keep its tokens, to the all_reduce."""
        chains: dict[fx.Node, Reduction] = {}
        for node in graph.nodes:
            name = op_name(node)
            reduction: Reduction | None = None
            if name == ALL_REDUCE:
                reduction = self.reduction(node)
            elif name == REGION_BEGIN or (name in VIEWS and keeps_tokens(node)):
                operand = node.args[0] if node.args else None
                reduction = chains.get(operand) if isinstance(operand, fx.Node) else None
            if reduction is not None and known_spec(node) is not None and not facts.mutated(node):
                chains[node] = reduction
        return chains

    def reduction(self, node: fx.Node) -> Reduction | None:
        """Return what the all_reduce `node` is, unless its tokens cannot be divided among its group."""
        given = arguments(node)
        rank, group = given["rank"], given["rank_group"]
        spec, addend = known_spec(node), known_spec(given["x"])
        if spec is None or addend is None or spec.shape != addend.shape or len(spec.shape) not in (2, 3):
            return None
        if any(type(member) is not int for member in (rank, *group)) or len(set(group)) != len(group):
            return None
        if rank not in group or len(group) < 2 or 0 in spec.shape:
            return None
        if not self.divides(spec.shape[token_dim(spec.shape)], len(group)):
            return None
        return Reduction(node, rank, tuple(group))

    def divides(self, tokens: int, members: int) -> bool:
        """Whether every member gets the same number of tokens."""
        return tokens % members == 0

    def match(self, norm: fx.Node, chains: dict[fx.Node, Reduction], facts: Placements) -> Match | None:
        """Return the match that `norm` is, if its operands allow it."""
        operands = NORM_OPERANDS.get(op_name(norm))
        if operands is None:
            return None
        given = arguments(norm)
        operand = next((name for name in operands if given[name] in chains), None)
        if operand is None:
            return None
        reduction = chains[given[operand]]
        x, result = known_spec(given["x"]), known_spec(norm)
        if x is None or result is None or result.layout != TensorSpec.contiguous(x.shape, x.dtype).layout:
            return None
        if not isinstance(given["eps"], float) or not self.weight_allows(given["weight"], reduction, facts):
            return None
        match = Match(norm, reduction, operand, given[operand])
        other = other_addend(match)
        if other is not None and other is not match.source:
            spec, source = known_spec(other), known_spec(match.source)
            if spec is None or source is None or unbatched(spec.shape) != unbatched(source.shape):
                return None
            if not self.addend_allows(other, reduction, facts):
                return None
        return match

    def weight_allows(self, weight: Any, reduction: Reduction, facts: Placements) -> bool:
        """Whether the norm's weight is the same on all members and extends over the hidden dim alone."""
        spec = known_spec(weight)
        return spec is not None and len(spec.shape) == 1 and facts.replicated(weight, reduction.group)

    def addend_allows(self, addend: fx.Node, reduction: Reduction, facts: Placements) -> bool:
        """Whether the other addend of a norm is the same on all members, so that each may take its chunk of it."""
        return facts.replicated(addend, reduction.group)

    def movable(self, chains: dict[fx.Node, Reduction], norms: dict[fx.Node, Match]) -> set[fx.Node]:
        """The values of chains that may be rebuilt on the shard: those behind no marker that others read in full.

        A marker opens a region, which must not be opened twice: it moves to the shard with all its readers or not at all.
        """
        local_readers_only: set[fx.Node] = set()
        for node, reduction in reversed(chains.items()):
            if node is reduction.node:
                continue  # an all_reduce reads its operand in full, whatever becomes of its own readers
            readers = [reads_as_source(user, node, norms) or user in local_readers_only for user in node.users]
            if readers and all(readers):  # what nobody reads would be left behind on a value that moved away
                local_readers_only.add(node)
        movable: set[fx.Node] = set()
        for node, reduction in chains.items():
            moves = op_name(node) != REGION_BEGIN or self.marker_moves(node, local_readers_only)
            if node is reduction.node or (node.args[0] in movable and moves):
                movable.add(node)
        return movable

    def marker_moves(self, marker: fx.Node, local_readers_only: set[fx.Node]) -> bool:
        """Whether all readers of a marker move to the shard with it."""
        return marker in local_readers_only

    # ---------------------------------------------------------------------------------------------------- rewriting

    def apply(self, graph: fx.Graph, match: Match, shards: dict[fx.Node, fx.Node], facts: Placements) -> list[fx.Node]:
        """Move one norm to the shard and gather its result.

        Args:
            shards: what has been rebuilt on the shard so far, by the value on all tokens; it is added to.

        Returns:
            The other addend on all tokens, which the norm reads no more.
        """
        norm, reduction = match.norm, match.reduction
        displaced = []
        other = other_addend(match)
        local = self.local(graph, match.source, reduction, shards)
        if other is not None:
            slot = "residual" if match.operand == "x" else "x"
            if other is match.source:
                set_argument(norm, slot, local)
            else:
                set_argument(norm, slot, self.local_addend(graph, other, match, facts))
                displaced.append(other)
        set_argument(norm, match.operand, local)
        self.gather(graph, match)
        return displaced

    def local(self, graph: fx.Graph, value: fx.Node, reduction: Reduction, shards: dict[fx.Node, fx.Node]) -> fx.Node:
        """Return this rank's shard of a value of a chain, made once for all norms that read it."""
        path = []
        while value not in shards:
            path.append(value)
            if value is reduction.node:
                break
            value = value.args[0]  # type: ignore[assignment]
        for node in reversed(path):
            if node is reduction.node:
                shards[node] = self.scatter(graph, reduction)
                continue
            operand = shards[node.args[0]]  # type: ignore[index]
            if op_name(node) == REGION_BEGIN:
                node.update_arg(0, operand)
                self.record(node)
                shards[node] = node
            else:
                shards[node] = self.local_view(graph, node, operand, len(reduction.group))
        return shards[path[0]] if path else shards[value]

    def scatter(self, graph: fx.Graph, reduction: Reduction) -> fx.Node:
        """Insert the reduce_scatter, next to the all_reduce."""
        shape = shape_of(reduction.node)
        args = (reduction.value, self.scatter_dim(shape), reduction.rank, list(reduction.group))
        with graph.inserting_after(reduction.node):
            return self.insert(graph, "tensor_cast::reduce_scatter", args, "reduce_scatter")

    def scatter_dim(self, shape: tuple[int, ...]) -> int:
        """The dim that is scattered."""
        return token_dim(shape)

    def local_view(self, graph: fx.Graph, view: fx.Node, operand: fx.Node, members: int) -> fx.Node:
        """Insert the view of the shard: it has the static shape of the shard."""
        shape = list(shape_of(view))
        shape[token_dim(tuple(shape))] //= members
        with graph.inserting_before(view):
            return self.insert(graph, "aten::view", (operand, shape), f"{view.name}_shard")

    def local_addend(self, graph: fx.Graph, addend: fx.Node, match: Match, facts: Placements) -> fx.Node:
        """Return this rank's chunk of a replicated addend: the shard it was gathered from, else a slice."""
        reduction = match.reduction
        shape = shape_of(addend)
        dim = token_dim(shape)
        if op_name(addend) == ALL_GATHER:
            given = arguments(addend)
            part: fx.Node = given["x"]
            same = tuple(given["rank_group"]) == reduction.group and given["dim"] % len(shape) == dim
            if same and not facts.mutated(part):
                return part
        chunk = shape[dim] // len(reduction.group)
        start = self.chunk_start(chunk, reduction)
        with graph.inserting_before(match.norm):
            return self.insert(graph, "aten::slice.Tensor", (addend, dim, start, start + chunk), "residual_shard")

    def chunk_start(self, chunk: int, reduction: Reduction) -> int:
        """Where this rank's chunk starts, in tokens."""
        return chunk * reduction.position

    def gather(self, graph: fx.Graph, match: Match) -> fx.Node:
        """Insert the all_gather behind the norm and let the norm's readers read it."""
        norm, reduction = match.norm, match.reduction
        whole = norm.meta["val"]
        self.record(norm)
        dim = token_dim(tuple(whole.shape))
        args = (norm, dim, reduction.rank, self.gather_group(reduction))
        with graph.inserting_after(norm):
            gathered = graph.create_node("call_function", resolve(ALL_GATHER), args, name="all_gather")
        # The value on all tokens is the same as before, and the metadata of its views refers to this one's storage.
        gathered.meta["val"] = whole
        self.redirect(norm, gathered)
        return gathered

    def gather_group(self, reduction: Reduction) -> list[int]:
        """The group over which the norm is gathered, in order."""
        return list(reduction.group)

    def redirect(self, norm: fx.Node, gathered: fx.Node) -> None:
        """Let every reader of the norm read the gathered value."""
        norm.replace_all_uses_with(gathered, delete_user_cb=lambda user: user is not gathered)

    def insert(self, graph: fx.Graph, op: str, args: tuple[Any, ...], name: str) -> fx.Node:
        """Insert a call at the graph's insertion point, with its metadata."""
        node = graph.create_node("call_function", resolve(op), args, name=name)
        annotate(node)
        return node

    def record(self, node: fx.Node) -> None:
        """Renew the metadata of a node whose operands have changed."""
        annotate(node)
