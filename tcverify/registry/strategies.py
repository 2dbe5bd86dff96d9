"""The strategies by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tcverify.errors import UsageError
from tcverify.registry.registry import Registry

#: Strategies by the name that `--strategy` takes; each is called like `transformer_programs`.
STRATEGIES: Registry[Callable[..., Any]] = Registry(
    {
        "mixed": "tcverify.strategies:mixed_programs",
        "structured": "tcverify.strategies:transformer_programs",
        "near-miss": "tcverify.strategies:near_miss_programs",
        "aimed": "tcverify.strategies:aimed_programs",
        "moe": "tcverify.strategies:moe_programs",
        "wild": "tcverify.strategies:wild_programs",
        "overlap": "tcverify.strategies:overlap_programs",
        "functional": "tcverify.strategies:functional_programs",
        "traced": "tcverify.strategies:traced_programs",
        "peephole": "tcverify.strategies:peephole_programs",
        "gram": "tcverify.strategies:gram_programs",
        "data-parallel": "tcverify.strategies:data_parallel_programs",
        "async-tp": "tcverify.strategies:async_tp_programs",
        "effects": "tcverify.strategies:effects_programs",
        "bucketing": "tcverify.strategies:bucketing_programs",
        "fsdp": "tcverify.strategies:fsdp_programs",
        "sequence-functional": "tcverify.strategies:sequence_functional_programs",
        "compiled": "tcverify.strategies:compiled_programs",
        "resharding": "tcverify.strategies:resharding_programs",
        "dtensor": "tcverify.strategies:dtensor_programs",
        "cross-entropy": "tcverify.strategies:cross_entropy_programs",
        "pipelining": "tcverify.strategies:pipelining_programs",
        "training": "tcverify.strategies:training_programs",
        "tensor-parallel": "tcverify.strategies:tensor_parallel_programs",
        "gradients": "tcverify.strategies:gradients_programs",
        "attention": "tcverify.strategies:attention_programs",
    }
)

#: The default, for passes without a strategy of their own.
DEFAULT_STRATEGY = "mixed"

#: Built-in strategies that are not drawn from together with others: their programs have options, and some meshes, of their own.
ALONE = ("dtensor", "cross-entropy", "pipelining", "training", "tensor-parallel", "gradients", "attention")

#: The numbers of ranks that most strategies draw meshes of, and those of others: whose programs are of whole tensors, which cost
#: little on more ranks and take other ways on uneven grids.
WORLD_SIZES = (2, 3, 4)
_WORLD_SIZES = {"dtensor": (2, 3, 4, 6, 8), "cross-entropy": (2, 3, 4, 6, 8), "resharding": (2, 3, 4, 5, 6)}

#: Separates the names of strategies that are drawn from together.
SEPARATOR = ","


def world_sizes_of(names: Iterable[str | None]) -> tuple[int, ...]:
    """The numbers of ranks that programs are drawn for by default: those of which each of these strategies draws meshes.

    Args:
        names: also combinations from `join_strategy_names`; None for strategies that are found by trial.
    """
    parts = [part for name in names for part in (name or DEFAULT_STRATEGY).split(SEPARATOR)]
    first, *others = [_WORLD_SIZES.get(part, WORLD_SIZES) for part in parts] or [WORLD_SIZES]
    return tuple(size for size in first if all(size in sizes for sizes in others))


def join_strategy_names(names: Iterable[str]) -> str:
    """The name of a combination of strategies, each drawn equally often; `programs_of` takes it.

    Raises:
        UsageError: a strategy does not build its programs from bytes, and so cannot be combined.
    """
    several = list(dict.fromkeys(names))
    alone = [name for name in several if name in ALONE or name not in STRATEGIES.references]
    if len(several) > 1 and alone:
        raise UsageError(f"strategy '{alone[0]}' cannot be drawn from together with others", "name it alone")
    return SEPARATOR.join(several)


def is_searchable(name: str | None) -> bool:
    """Whether programs of one or several strategies may be edited: those of users may have invariants that an edit breaks."""
    parts = [] if name is None else name.split(SEPARATOR)
    return bool(parts) and all(part in STRATEGIES.references and part not in ALONE for part in parts)


__all__ = [
    "ALONE",
    "DEFAULT_STRATEGY",
    "SEPARATOR",
    "STRATEGIES",
    "WORLD_SIZES",
    "is_searchable",
    "join_strategy_names",
    "world_sizes_of",
]
