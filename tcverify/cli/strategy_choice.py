"""Finds strategies whose programs a pass changes, by trying the pass on a few programs of each."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tcverify.application import Subject
from tcverify.campaign import CorpusCase
from tcverify.campaign.in_flight import InFlight
from tcverify.cases.baseline import pass_reference
from tcverify.program import Mesh, Program
from tcverify.strategies import DECODERS, DEFAULT_STRATEGY, all_meshes, join_strategy_names

#: Programs per strategy in the first trial, and in total if the pass changes none of them.
FIRST, ALL = 4, 16

#: Share of the time of a campaign that the trial takes at most, and while the pass changes nothing: a campaign on such programs
#: would test nothing.
SPENT, SPENT_IN_VAIN = 0.1, 1 / 3

#: A strategy is chosen if the pass changes at least this share of what it changes with the best strategy.
SHARE = 0.5


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """What to verify an unknown pass on.

    Attributes:
        names: of strategies: `DEFAULT_STRATEGY`, and those whose programs the pass changes most often.
        first: to be verified before drawn programs: a program on which the pass raised, hung or crashed, if any.
    """

    names: tuple[str, ...] = (DEFAULT_STRATEGY,)
    first: tuple[CorpusCase, ...] = ()

    @property
    def strategy(self) -> str:
        """All names as one, as `programs_of` takes them."""
        return join_strategy_names(self.names)


def choose_strategies(
    subject: Subject,
    state_dir: Path,
    name: str,
    world_size: int,
    mesh: Mesh | None = None,
    *,
    max_examples: int | None = None,
    max_time: float | None = None,
) -> StrategyChoice:
    """Try a pass on a fixed set of programs, and choose strategies for it. The trial ends if the pass hangs or crashes.

    Args:
        state_dir: directory in which the current program is saved, in case it crashes the run.
        name: of the mesh, or of whatever the programs have in common, as shown in reports.
        mesh: of the programs; None tries several of `world_size` ranks.
        max_examples, max_time: bounds of the campaign that follows, in programs and in seconds. The trial takes at most as many
            programs, but at least one per strategy, and a tenth of the time, or a third while the pass has changed nothing.

    Raises:
        UsageError: nothing can be written into `state_dir`.
    """
    in_flight = InFlight(state_dir, subject, subject.contract)
    rounds = ALL if max_examples is None else min(ALL, max(1, max_examples // (len(DECODERS) - 1)))
    limit = math.inf if max_time is None else max_time
    meshes = [mesh] if mesh is not None else all_meshes(world_size)
    try:
        found = _tried(subject, in_flight, name, meshes, rounds, limit)
    except KeyboardInterrupt:
        in_flight.clear()
        raise
    except BaseException:
        in_flight.close()
        raise
    in_flight.clear()
    return found


def _tried(
    subject: Subject, in_flight: InFlight, name: str, meshes: Sequence[Mesh], rounds: int, limit: float
) -> StrategyChoice:
    start = time.monotonic()
    tried = [strategy for strategy in DECODERS if strategy != DEFAULT_STRATEGY]
    drawn = _drawn(tried, rounds, meshes)
    did = dict.fromkeys(tried, 0)
    failed: tuple[CorpusCase, ...] = ()
    ahead = next(drawn, None)
    while ahead is not None:
        number, strategy, program = ahead
        changes = any(did.values())
        over = time.monotonic() - start > limit * (SPENT if changes else SPENT_IN_VAIN)
        if over or (strategy == tried[0] and number >= FIRST and changes):
            break
        in_flight.note(program, deep=False)
        answer = subject.start(program)
        ahead = next(drawn, None)  # while the pass runs
        pair = answer()
        if pair.failure is not None:
            failed = failed or (CorpusCase(pass_reference(subject.facts), name, program, (pair.failure.kind,)),)
            if pair.failure.kind != "pass-raised":
                return StrategyChoice(first=failed)
        did[strategy] += pair.changed or pair.failure is not None
    most = max(did.values())
    return StrategyChoice((DEFAULT_STRATEGY, *(one for one in tried if most and did[one] >= SHARE * most)), failed)


def _drawn(strategies: Sequence[str], rounds: int, meshes: Sequence[Mesh]) -> Iterator[tuple[int, str, Program]]:
    """One program of each strategy per round: the number of the round, the strategy, the program."""
    choices = {strategy: random.Random(strategy) for strategy in strategies}
    for number, strategy in itertools.product(range(rounds), strategies):
        decoder = DECODERS[strategy]
        yield number, strategy, decoder.decode(meshes[number % len(meshes)], choices[strategy].randbytes(decoder.width))


__all__ = ["StrategyChoice", "choose_strategies"]
