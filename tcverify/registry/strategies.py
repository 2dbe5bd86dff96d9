"""The strategies by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tcverify.errors import UsageError
from tcverify.registry.registry import Registry

#: Strategies by the name that `--strategy` takes; each is called as `transformer_programs` is.
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

#: The one that is drawn from where no other is known to suit a pass.
DEFAULT_STRATEGY = "mixed"

#: Those of ours that do not make their programs of bytes, so that no byte can choose between them and others.
ALONE = ("dtensor", "pipelining")

#: What stands between the names of strategies that are drawn from together.
SEPARATOR = ","


def join_strategy_names(names: Iterable[str]) -> str:
    """The name of what draws from several strategies, from each an equal share; `programs_of` takes it.

    Raises:
        UsageError: one of several makes its programs otherwise than of bytes.
    """
    several = list(dict.fromkeys(names))
    alone = [name for name in several if name in ALONE or name not in STRATEGIES.references]
    if len(several) > 1 and alone:
        raise UsageError(f"strategy '{alone[0]}' cannot be drawn from together with others", "name it alone")
    return SEPARATOR.join(several)


def is_searchable(name: str | None) -> bool:
    """Whether programs may be edited that a strategy draws, or several: those of users may rest on what an edit breaks."""
    parts = [] if name is None else name.split(SEPARATOR)
    return bool(parts) and all(part in STRATEGIES.references and part not in ALONE for part in parts)


__all__ = ["ALONE", "DEFAULT_STRATEGY", "SEPARATOR", "STRATEGIES", "is_searchable", "join_strategy_names"]
