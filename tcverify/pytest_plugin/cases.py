"""From the arguments of `verifies` to cases: one per pass × world × shard. Whatever makes no sense is refused here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tcverify.checks import CHECKS
from tcverify.cli.machine import require_backend
from tcverify.errors import UsageError
from tcverify.execution import EXECUTORS
from tcverify.program import Contract
from tcverify.pytest_plugin.decorator import Verification
from tcverify.pytest_plugin.options import Options
from tcverify.pytest_plugin.profiles import PROFILES
from tcverify.pytest_plugin.references import Reference, reference_to
from tcverify.pytest_plugin.worlds import World, known_value, make_worlds, require_list
from tcverify.registry.choices import DOMAINS, HOSTILE, DomainName, HostileName, Word

#: Most items of one pass and world.
MAX_SHARDS = 1000


@dataclass(frozen=True, slots=True, repr=False)
class PytestCase:
    """What one item verifies. `contract` changes what the pass declares, or replaces it."""

    reference: Reference
    world: World
    shard: int
    shards: int
    max_examples: int
    contract: Contract | dict[str, str]
    pass_options: dict[str, Any]
    checks: tuple[str, ...] | None
    confirm: str
    domain: DomainName
    hostile: tuple[HostileName, ...]
    pass_timeout: float
    shrink_time: float

    @property
    def id(self) -> str:
        """The item's part of the id, e.g. "MyPass-tp2-0/4"."""
        shard = f"{self.shard}/{self.shards}" if self.shards > 1 else ""
        return "-".join(part for part in (self.reference.label, self.world.label, shard) if part)

    def __repr__(self) -> str:
        return f"<{self.id}>"


def make_cases(asked: Verification, options: Options) -> list[PytestCase]:
    """Return the cases that `verifies` asks for.

    Raises:
        UsageError: it asks for what does not exist or cannot work.
    """
    if not asked.passes:
        raise UsageError("verifies names no pass", "write @tcverify.verifies(MyPass)")
    profile = PROFILES[options.profile]
    confirm = options.confirm
    if asked.confirm is not None:
        confirm = known_value(asked.confirm, (*EXECUTORS, "none"), "confirm")
    require_backend(confirm, "--tcverify-confirm")
    shards = _whole(asked.shards, "shards", MAX_SHARDS, profile.shards)
    pass_options = _pass_options(asked.pass_options)
    worlds = make_worlds(asked)
    references = [reference_to(pass_, options.start_dir, options.fresh_path) for pass_ in asked.passes]
    return [
        PytestCase(
            reference,
            world,
            shard,
            shards,
            _whole(asked.max_examples, "max_examples", 10**9, profile.max_examples),
            _contract(asked.contract),
            pass_options,
            None if asked.checks is None else _names(asked.checks, tuple(CHECKS), "checks", '["equivalence"]'),
            confirm,
            options.domain if asked.domain is None else known_value(asked.domain, DOMAINS, "domain"),
            () if asked.hostile == () else _names(asked.hostile, HOSTILE, "hostile", '("metadata",)'),
            _seconds(asked.pass_timeout, "pass_timeout", above=0.0),
            _seconds(asked.shrink_time, "shrink_time"),
        )
        for reference in references
        for world in worlds
        for shard in range(shards)
    ]


def _whole(given: Any, name: str, most: int, default: int) -> int:
    if given is None:
        return default
    if type(given) is not int or not 1 <= given <= most:
        raise UsageError(f"{name}={repr(given)[:80]} is not a number between 1 and {most}")
    return given


def _seconds(given: Any, name: str, above: float = -1.0) -> float:
    if type(given) not in (int, float) or not above < given <= 86400 or given < 0:
        raise UsageError(f"{name}={repr(given)[:80]} is not a time in seconds", "at most a day")
    return float(given)


def _names(given: Any, known: Sequence[Word], name: str, example: str) -> tuple[Word, ...]:
    return tuple(known_value(one, known, name) for one in require_list(given, name, example))


def _contract(given: Any) -> Contract | dict[str, str]:
    if given is None or isinstance(given, Contract):
        return given or {}
    if not isinstance(given, Mapping):
        raise UsageError(f"contract={repr(given)[:80]} is not a contract", 'write contract={"idempotent": True}')
    for name, value in given.items():
        if type(value) not in (bool, str):
            raise UsageError(f"contract: '{name}' is {repr(value)[:80]}, not True, False or a word")
    promises = {str(name): str(value) for name, value in given.items()}
    Contract().with_options(promises)
    return promises


def _pass_options(given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise UsageError(
            f"pass_options={repr(given)[:80]} are not options by name", 'write pass_options={"name": value}'
        )
    try:
        json.dumps(dict(given))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"pass_options cannot be sent to the pass's process: {error}",
            "use numbers, texts, lists and dicts, or give the pass as an instance",
        ) from None
    return dict(given)
