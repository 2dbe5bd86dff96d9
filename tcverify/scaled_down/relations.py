"""Derives the relations between the sizes of a program from its graphs: what views merge and split, concatenations and slices.

Within one call, equal numbers are one size, unless they are at broadcast positions; along an edge, sizes are unchanged.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from tcverify.errors import TcverifyError
from tcverify.ops import ShapeError, TensorSpec, infer, lookup, merged_runs, qualified_name
from tcverify.ops.leaves import leaves
from tcverify.program import Program, RankConstant
from tcverify.program.graph import constant_value
from tcverify.scaled_down.call_dims import beside_collectives, by_places
from tcverify.scaled_down.size_probing import Probe
from tcverify.scaled_down.sizes import Size, Sizes

#: Ops for which a dim of an operand, or of a result, is the sum of the same dims of several tensors.
_JOINS = frozenset({"aten::cat"})
_SPLITS = frozenset(
    {"aten::split", "aten::split_with_sizes", "aten::chunk", "aten::split_with_sizes_copy", "aten::tensor_split"}
)

#: Ops that take a slice of a dim, from a start to an end.
_SLICES = frozenset({"aten::slice", "aten::slice_scatter", "aten::slice_copy", "aten::slice_backward"})

#: Ops for which a dim of the result is a multiple of the same dim of an operand.
_REPEATS = frozenset({"aten::repeat"})

#: Sizes by number, at one call.
Scope = dict[int, Size]


class SizeRelations:
    """The sizes of a program.

    Args:
        precise: whether sizes of equal numbers are distinguished at calls. Not for ranks that run different graphs: nothing
            would relate their sizes.

    Attributes:
        sizes: the solver for all of them.
        inputs: of the global shape of each input, by name; programs that are compared share them.
        of: of the tensors that each node returns, in order.
        scopes: at each node.
        vals: result of each node: inferred from its operands, or else from its metadata.
        wrong: the first call whose operands do not fit together.
        lists: at nodes with sizes in one of their arguments, which argument that is, and these sizes.
        ranks: numbers of ranks of groups.
        beside: the nodes at which a dim may correspond to the members of a group.
    """

    def __init__(
        self,
        program: Program,
        sizes: Sizes,
        inputs: dict[str, list[Size]],
        precise: bool = True,
    ) -> None:
        self.ranks = {len(group) for dim in program.mesh.dims for group in dim.groups}
        self.beside = set().union(*map(beside_collectives, program.graphs))
        self.lists: dict[fx.Node, tuple[int, list[Size]]] = {}
        self._precise = precise
        self.inputs = inputs
        self.of: dict[fx.Node, list[list[Size]]] = {}
        self.scopes: dict[fx.Node, Scope] = {}
        self.vals: dict[fx.Node, Any] = {}
        self.wrong: str | None = None
        self._fresh = itertools.count(1 << 20).__next__
        self.sizes = sizes
        self._constants: dict[tuple[str, int], Size] = {}
        self._locals: dict[tuple[str, int, int], Size] = {}
        for spec in program.inputs:
            if spec.name not in inputs:
                inputs[spec.name] = [sizes.new(number) for number in spec.shape]
        for number, graph in enumerate(program.graphs):
            rank = next(r for r, binding in enumerate(program.ranks) if binding.graph == number)
            values = _distinct([binding.constants for binding in program.ranks if binding.graph == number])
            local = {spec.name: spec.local_shape(program.mesh, rank) for spec in program.inputs}
            constants, groups = program.ranks[rank].constants, program.mesh.groups(rank)
            for node in graph.nodes:
                self.vals[node] = self._given(node, constants, groups)
                self._relate(node, local, values, constants, groups)

    def _given(self, node: fx.Node, constants: Mapping[str, Any], groups: Mapping[str, Sequence[int]]) -> Any:
        """The result of a node. Small sizes might fit even if these do not, so a misfit is recorded."""
        said = node.meta.get("val")
        if node.op != "call_function" or any(self.vals.get(read) is None for read in node.all_input_nodes):
            return said
        found = infer_result(node, self.vals.__getitem__, constants, groups, self._fresh)
        if found is MISFIT and self.wrong is None:
            self.wrong = node.name
        return said if found in (MISFIT, UNKNOWN) else found

    def specs(self, node: fx.Node) -> list[TensorSpec]:
        """The tensors that a node returns."""
        return specs_of(self.vals.get(node))

    def _relate(
        self,
        node: fx.Node,
        local: Mapping[str, Sequence[int]],
        values: Sequence[Mapping[str, Any]],
        constants: Mapping[str, Any],
        groups: Mapping[str, Sequence[int]],
    ) -> None:
        scope = self.scopes[node] = {}
        if node.op == "placeholder":
            self.of[node] = [[self._local(node.name, dim, n) for dim, n in enumerate(local[node.name])]]
            return
        if node.op == "output":  # results returned together need not be related
            self.of[node] = [dims for read in node.all_input_nodes for dims in self.of.get(read, ())]
            return
        made = by_places(node, self) if self._precise and node.op == "call_function" else None
        if made is not None:
            self.of[node], listed, place = made
            self.lists[node] = place, listed
            self._note(node, scope)
            return
        probed = self._probed(node, constants, groups) if self._precise and self._ambiguous(node) else None
        if probed is not None:
            self.of[node], literals = probed
            scope.update(literals)
            self._note(node, scope)
            return
        for read in node.all_input_nodes:
            self._enter(scope, self.of.get(read, ()))
        self.of[node] = [[self.at(scope, number) for number in spec.shape] for spec in self.specs(node)]
        if node.op == "call_function":
            _Call(self, node, scope, values).relate()

    def _note(self, node: fx.Node, scope: Scope) -> None:
        """Enter the sizes at a call with known operands and result."""
        operands = itertools.chain(*(self.of[read] for read in node.all_input_nodes))
        for size in itertools.chain(*operands, *self.of[node]):
            scope.setdefault(self.sizes.number[size], size)

    def _ambiguous(self, node: fx.Node) -> bool:
        """Whether different sizes of the same number may meet at a call."""
        if node.op != "call_function" or any(r not in self.of for r in node.all_input_nodes):
            return False
        if _named(node, _SLICES | _JOINS):
            return False  # with known sums
        kinds: dict[int, set[Size]] = {}
        for size in itertools.chain(*itertools.chain(*(self.of[read] for read in node.all_input_nodes))):
            if self.sizes.number[size] > self.sizes.small:
                kinds.setdefault(self.sizes.number[size], set()).add(self.sizes.kind(size))
        large = ([n for n in spec.shape if n > self.sizes.small] for spec in self.specs(node))
        return any(len(some) > 1 for some in kinds.values()) or any(len(set(own)) < len(own) for own in large)

    def _probed(
        self, node: fx.Node, constants: Mapping[str, Any], groups: Mapping[str, Sequence[int]]
    ) -> tuple[list[list[Size]], dict[int, Size]] | None:
        found = literals_of(node, self.specs)
        literals = list(dict.fromkeys(n for n in found if type(n) is int and abs(n) > self.sizes.small))
        if any(type(n) is not int for n in found) or min(literals, default=1) < 0:
            return None

        def infer_of(values: Mapping[str, Any], number: Callable[[int], int]) -> list[tuple[int, ...]] | None:
            def changed(value: Any) -> Any:
                return number(value) if type(value) is int and value > self.sizes.small else value

            given = mapped_literals(node, self.specs, changed, changed)
            got = infer_result(node, lambda read: values[read.name], constants, groups, self._fresh, given)
            return None if got in (MISFIT, UNKNOWN) else [spec.shape for spec in specs_of(got)]

        operands = {read.name: (self.vals.get(read), self.of[read]) for read in node.all_input_nodes}
        results = [spec.shape for spec in self.specs(node)]
        return Probe(operands, results, literals, infer_of, self.sizes).sizes_of_results()

    def _local(self, name: str, dim: int, number: int) -> Size:
        """The size of a dim of a rank's part of an input: scaled as the whole is."""
        whole = self.inputs[name][dim]
        if self.sizes.number[whole] == number:
            return whole
        key = name, dim, number
        if key not in self._locals:
            self._locals[key] = self.sizes.new(number)
            self.sizes.tie(whole, self._locals[key])
        return self._locals[key]

    def _enter(self, scope: Scope, found: Sequence[Sequence[Size]]) -> None:
        for size in itertools.chain(*found):
            known = scope.setdefault(self.sizes.number[size], size)
            if known != size and self.sizes.number[size] != 1:
                self.sizes.tie(known, size)

    def at(self, scope: Scope, number: int) -> Size:
        """The size of this number at a call."""
        if number not in scope:
            scope[number] = self.sizes.new(number)
        return scope[number]

    def constant(self, name: str, value: int, scope: Scope) -> None:
        """A rank constant is the same size wherever it is read."""
        size = self._constants.setdefault((name, value), self.at(scope, value))
        self.sizes.tie(size, self.at(scope, value))


def _named(node: fx.Node, names: Collection[str]) -> bool:
    return node.op == "call_function" and qualified_name(node.target).split(".")[0] in names


def _tie(first: SizeRelations, one: fx.Node, second: SizeRelations, other: fx.Node) -> None:
    """Keep the results of two nodes equal in shape, where they are."""
    for mine, theirs in zip(first.of.get(one, ()), second.of.get(other, ()), strict=False):
        numbers = [[related.sizes.number[s] for s in dims] for related, dims in ((first, mine), (second, theirs))]
        if numbers[0] == numbers[1]:
            for a, b in zip(mine, theirs, strict=True):
                first.sizes.tie(a, b)


def tie_results(first: SizeRelations, second: SizeRelations, programs: Sequence[Program]) -> None:
    """The results of two programs on a rank are compared: they keep equal shapes."""
    ranks = zip(programs[0].ranks, programs[1].ranks, strict=True)
    for mine, theirs in dict.fromkeys((a.graph, b.graph) for a, b in ranks):
        for one, other in zip(_returned(programs[0].graphs[mine]), _returned(programs[1].graphs[theirs]), strict=False):
            _tie(first, one, second, other)


def _returned(graph: fx.Graph) -> list[fx.Node]:
    return [leaf for node in graph.nodes if node.op == "output" for leaf in leaves(node.args, fx.Node)]


def _distinct(constants: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return list({repr(sorted(one.items())): one for one in constants}.values())


#: Marks the result of a call of which nothing is known, and of one whose operands do not fit together.
UNKNOWN, MISFIT = "unknown", "misfit"


def infer_result(
    node: fx.Node,
    val: Callable[[fx.Node], Any],
    constants: Mapping[str, Any],
    groups: Mapping[str, Sequence[int]],
    fresh: Callable[[], int],
    given: tuple[Any, Any] | None = None,
) -> Any:
    """The result of a call; or `MISFIT`, or `UNKNOWN`.

    Args:
        val: values of its operands.
        given: arguments that replace its own.
    """

    def leaf(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return val(value)
        return constant_value(value, constants) if isinstance(value, RankConstant) else value

    plain, named = given or (node.args, node.kwargs)
    args, kwargs = map_aggregate(plain, leaf), dict(map_aggregate(named, leaf))
    try:
        return infer(node.target, args, kwargs, fresh, groups)
    except ShapeError:
        return MISFIT
    except (TcverifyError, ValueError, TypeError, IndexError):
        return UNKNOWN


def specs_of(val: Any) -> list[TensorSpec]:
    """The tensors in the result of a node."""
    if isinstance(val, TensorSpec):
        return [val]
    return [leaf for leaf in pytree.tree_leaves(val) if isinstance(leaf, TensorSpec)]


class _Call:
    """The relations between the sizes at one call."""

    def __init__(
        self, related: SizeRelations, node: fx.Node, scope: Scope, values: Sequence[Mapping[str, Any]]
    ) -> None:
        self._related, self._node, self._scope, self._values = related, node, scope, values
        self.sizes = related.sizes

    def relate(self) -> None:
        node = self._node
        name = qualified_name(node.target).split(".")[0]
        operands = [spec.shape for read in node.all_input_nodes for spec in self._related.specs(read)]
        results = [spec.shape for spec in self._related.specs(node)]
        for literal in literals_of(node, self._related.specs):
            if isinstance(literal, RankConstant):
                for value in self._numbers(literal):
                    if value > 1:
                        self._related.constant(literal.name, value, self._scope)
                positions, ranks = self._numbers(literal), len(self._values)
                if name not in _SLICES and all(0 <= n < ranks for n in positions):
                    # positions of ranks are not sizes, and the indexed dim keeps its size as long as they exist
                    indexed = (n for shape in (*operands, *results) for n in shape if n <= ranks)
                    self.sizes.pin(self._at(n) for n in {*positions, *indexed} if n > 1)
        if len(operands) == 1 and len(results) == 1:
            self._view(operands[0], results[0])
        if lookup(node.target).collective:
            for literal, shape in itertools.product(self._lists(), (*operands, *results)):
                if shape and sum(literal) == shape[0] and len(literal) > 1:
                    self._sum(shape[0], literal)
        if name in _REPEATS or lookup(node.target).collective:
            for result, operand in itertools.product(results, operands):
                self._resized(operand, result)
        elif name in _JOINS and results:
            self._parts(results[0], self._listed())
        elif name in _SPLITS and operands:
            self._parts(operands[0], results)
        elif name in _SLICES and operands and results:
            self._slice(operands[0], results[0])

    def _at(self, number: int) -> Size:
        return self._related.at(self._scope, number)

    def _lists(self) -> list[list[int]]:
        """The lists of numbers among the arguments of the call: above all, splits."""
        given = (*self._node.args, *self._node.kwargs.values())
        return [
            list(one) for one in given if isinstance(one, (list, tuple)) and all(type(n) is int and n > 0 for n in one)
        ]

    def _listed(self) -> list[tuple[int, ...]]:
        """The shapes of operands in lists; those passed twice also appear twice."""
        listed = next((arg for arg in self._node.args if isinstance(arg, (list, tuple))), ())
        return [spec.shape for read in listed if isinstance(read, fx.Node) for spec in self._related.specs(read)]

    def _view(self, before: Sequence[int], after: Sequence[int]) -> None:
        """Products of dims that a view merges or splits stay equal."""
        if tuple(before) == tuple(after) or 0 in before or math.prod(before) != math.prod(after):
            return
        if sorted(n for n in before if n != 1) == sorted(n for n in after if n != 1):
            return
        if self._node in self._related.beside:  # by member, of the operands and results of collectives
            self.sizes.pin(self._at(n) for n in {*before, *after} if n in self._related.ranks)
        for merged, split in merged_runs(before, after):
            left, right = [n for n in before[merged] if n != 1], [n for n in after[split] if n != 1]
            if left != right:
                self.sizes.multiply([self._at(n) for n in left], [self._at(n) for n in right])

    def _resized(self, operand: Sequence[int], result: Sequence[int]) -> None:
        """A dim that differs in the result is a part or a multiple of it."""
        if len(operand) != len(result):
            return
        for before, after in zip(operand, result, strict=True):
            if before == after or 0 in (before, after):
                continue
            if 1 not in (before, after):
                self.sizes.tie(self._at(before), self._at(after))
            elif max(before, after) in self._related.ranks:  # one row of each member
                self.sizes.pin([self._at(max(before, after))])

    def _parts(self, whole: Sequence[int], parts: Sequence[Sequence[int]]) -> None:
        """In the dim in which parts differ from the whole, the whole is the sum of the parts."""
        if any(len(part) != len(whole) for part in parts):
            return
        for place, size in enumerate(whole):
            own = [part[place] for part in parts]
            if own != [size] and sum(own) == size:
                self.sizes.sum_up(self._at(size), [self._at(n) for n in own])

    def _slice(self, operand: Sequence[int], result: Sequence[int]) -> None:
        """Positions are sums: an end is the start plus the length in between."""
        names = [argument.name for argument in self._node.target._schema.arguments]  # type: ignore[union-attr]
        given = {**dict(zip(names, self._node.args, strict=False)), **self._node.kwargs}
        dim = given.get("dim", 0)
        if type(dim) is not int or not -len(operand) <= dim < len(operand):
            return
        whole = max(operand[dim], result[dim]) if len(operand) == len(result) else operand[dim]
        starts, ends = self._numbers(given.get("start") or 0), self._numbers(given.get("end")) or [whole]
        for start, end in itertools.zip_longest(starts, ends, fillvalue=None):
            first = start if start is not None else starts[0]
            last = min(end if end is not None else ends[0], whole)
            first, last = (n + whole if n < 0 else n for n in (first, last))
            if 0 <= first < last <= whole:
                self._sum(last, [first, last - first])
                self._sum(whole, [last, whole - last])

    def _sum(self, whole: int, parts: Sequence[int]) -> None:
        own = [n for n in parts if n]
        if own != [whole]:
            self.sizes.sum_up(self._at(whole), [self._at(n) for n in own])

    def _numbers(self, literal: Any) -> list[int]:
        """The numbers that a literal represents, on all ranks."""
        if isinstance(literal, RankConstant):
            found = [values.get(literal.name) for values in self._values]
            flat = [n for one in found for n in (one if isinstance(one, (list, tuple)) else [one])]
        else:
            flat = [literal]
        return list(dict.fromkeys(n for n in flat if type(n) is int))


def literals_of(node: fx.Node, specs: Callable[[fx.Node], list[TensorSpec]]) -> list[Any]:
    """The numbers in the arguments of a call that may be sizes or positions, including rank constants."""
    found: list[Any] = []

    def keep(value: Any) -> Any:
        found.append(value)
        return value

    mapped_literals(node, specs, keep, keep)
    return found


def mapped_literals(
    node: fx.Node,
    specs: Callable[[fx.Node], list[TensorSpec]],
    size: Callable[[Any], Any],
    compared: Callable[[Any], Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, with numbers replaced that may be sizes or positions.

    Args:
        specs: results of nodes.
        size: replaces symbolic integers of the schema.
        compared: replaces numbers in ops without operands, or on integers.
    """
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.args, dict(node.kwargs)
    symbolic, others = _symbolic(node.target), _SCALARS if _on_numbers(node, specs) else frozenset()

    def changed(name: str, value: Any) -> Any:
        change = size if name in symbolic else compared if name in others else None
        if change is None:
            return value
        return map_aggregate(value, lambda v: change(v) if type(v) is int or isinstance(v, RankConstant) else v)

    names = [argument.name for argument in schema.arguments]
    args = tuple(changed(name, value) for name, value in zip(names, node.args, strict=False))
    return args, {name: changed(name, value) for name, value in node.kwargs.items()}


def _on_numbers(node: fx.Node, specs: Callable[[fx.Node], list[TensorSpec]]) -> bool:
    """Whether a scalar argument may be a size: for factory ops, and for ops that compare or offset integers."""
    given = [spec for read in node.all_input_nodes for spec in specs(read)]
    return bool(given or not node.all_input_nodes) and all(
        not spec.dtype.is_floating_point and not spec.dtype.is_complex for spec in given
    )


#: Symbolic integers that name ranks, dims or regions, whatever the schema calls them.
_NO_SIZES = re.compile(r"(\w+_)?ranks?(_group)?|dims?|(\w+_)?id|group")

#: A symbolic integer, or several, in the text of a schema.
_SYMBOLIC = re.compile(r"SymInt(?:\[\d*\])?\?? (\w+)")


@cache
def _symbolic(target: Any) -> frozenset[str]:
    return frozenset(name for name in _SYMBOLIC.findall(str(target._schema)) if not _NO_SIZES.fullmatch(name))


#: Arguments that may be sizes, of factory ops and of ops that compare integers.
_SCALARS = frozenset({"end", "start", "other", "length", "high", "low", "size"})


__all__ = [
    "MISFIT",
    "UNKNOWN",
    "Scope",
    "SizeRelations",
    "infer_result",
    "mapped_literals",
    "specs_of",
    "tie_results",
]
