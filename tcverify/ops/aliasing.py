"""Aliasing: which of its arguments an op writes into, and with which its results may share storage, as its schema says.

Ops without a schema, as those of Python, say nothing here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import fx

from tcverify.ops.leaves import leaves
from tcverify.ops.table import lookup, schema_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AliasedArgument:
    """An argument that an op does not only read.

    Attributes:
        position: in the schema.
        writes: whether the op writes into it.
        results: numbers of the results that may share its storage.
    """

    position: int
    name: str
    writes: bool
    results: tuple[int, ...]

    def given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a call passes for it; None where it leaves it to its default."""
        return args[self.position] if self.position < len(args) else kwargs.get(self.name)


def aliased_arguments(target: Any) -> tuple[AliasedArgument, ...]:
    """Return the arguments that `target` may write into, or alias in its results, in the order of its schema."""
    return _aliased(target, lookup(target).schema) if isinstance(target, torch._ops.OpOverload) else ()


@lru_cache(maxsize=1024)
def _aliased(target: Any, schema: str) -> tuple[AliasedArgument, ...]:
    """`schema`: what the tables say in place of torch; they may come to say something else."""
    signature = schema_of(target)
    assert signature is not None
    return tuple(
        AliasedArgument(
            position,
            argument.name,
            bool(argument.alias_info.is_write),
            tuple(
                i for i, result in enumerate(signature.returns) if _may_alias(argument.alias_info, result.alias_info)
            ),
        )
        for position, argument in enumerate(signature.arguments)
        if argument.alias_info is not None
    )


def _may_alias(argument: Any, result: Any) -> bool:
    """Sets of lists are empty: torch keeps them with what the list holds, where they cannot be read."""
    if result is None:
        return False
    mine, theirs = argument.before_set, result.before_set
    return not mine or not theirs or bool(mine & theirs)


def aliased(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], kind: type[T]
) -> Iterator[tuple[T, AliasedArgument]]:
    """Yield the values of a type that a call passes for aliased arguments, lists item by item, each with its argument."""
    for argument in aliased_arguments(target):
        for value in leaves(argument.given(args, kwargs), kind):
            yield value, argument


def mutated(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], kind: type[T]) -> list[T]:
    """The values of a type that a call writes into."""
    return [value for value, argument in aliased(target, args, kwargs, kind) if argument.writes]


def aliased_operands(node: fx.Node) -> Iterator[tuple[fx.Node, AliasedArgument]]:
    """Yield the operands that a node may write into, or alias in its results, each with its argument."""
    if node.op == "call_function":
        yield from aliased(node.target, node.args, node.kwargs, fx.Node)


def mutated_operands(node: fx.Node) -> list[fx.Node]:
    """The operands that a node writes into."""
    return [operand for operand, argument in aliased_operands(node) if argument.writes]


__all__ = [
    "AliasedArgument",
    "aliased",
    "aliased_arguments",
    "aliased_operands",
    "mutated",
    "mutated_operands",
]
