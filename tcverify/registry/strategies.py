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
        "pipelining": "tcverify.strategies:pipelining_programs",
    }
)

#: The default, for passes without a strategy of their own.
DEFAULT_STRATEGY = "mixed"

#: Built-in strategies that do not build their programs from bytes, so no byte can choose between them and others.
ALONE = ("dtensor", "pipelining")

#: Separates the names of strategies that are drawn from together.
SEPARATOR = ","


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


__all__ = ["ALONE", "DEFAULT_STRATEGY", "SEPARATOR", "STRATEGIES", "is_searchable", "join_strategy_names"]
