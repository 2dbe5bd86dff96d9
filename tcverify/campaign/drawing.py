"""Draws programs with Hypothesis, which is left as soon as there are enough of them."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis
from hypothesis import given, settings
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import SearchStrategy

from tcverify.campaign.hypothesis_settings import SETTINGS, keep_constants_out
from tcverify.program import Program


class _Stop(BaseException):
    """Leaves Hypothesis at once. Not an Exception: Hypothesis would take that for a failure and repeat it."""


class _Broken(BaseException):
    """Carries an error of ours, or a test runner's time-out, out of Hypothesis, which would repeat that too."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def draw(programs: SearchStrategy[Program], seed: int, budget: int, take: Callable[[Program], bool]) -> bool:
    """Draw programs, as many as the budget says at most, until `take` says of one that no other is wanted.

    Returns:
        Whether the strategy has no more programs.
    """
    drawn = 0

    @hypothesis.seed(seed)
    @settings(SETTINGS, max_examples=budget)
    @given(programs)
    def example(program: Program) -> None:
        nonlocal drawn
        drawn += 1
        try:
            more = take(program)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise _Broken(error) from error
        if not more:
            raise _Stop

    keep_constants_out()
    try:
        example()
    except _Stop:
        return False
    except _Broken as broken:
        raise broken.error from None
    except Unsatisfiable:  # the strategy rejects all that it draws
        return True
    return drawn < budget


__all__ = ["draw"]
