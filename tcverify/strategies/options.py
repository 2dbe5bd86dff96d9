"""Options of a pass, drawn with each program: some defects occur only with certain combinations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from tcverify.program import Program


def with_options(
    programs: st.SearchStrategy[Program], draws: Mapping[str, Sequence[Any]]
) -> st.SearchStrategy[Program]:
    """Draw options with programs.

    Args:
        draws: the values of each option, by name. The first one is the default of the pass, and is omitted.
    """
    if not draws:
        return programs

    def told(drawn: tuple[Program, bytes]) -> Program:
        program, choices = drawn
        chosen = {
            name: values[choice % len(values)]
            for choice, (name, values) in zip(choices, draws.items(), strict=True)
            if choice % len(values)
        }
        return replace(program, options={**program.options, **chosen})

    return st.tuples(programs, st.binary(min_size=len(draws), max_size=len(draws))).map(told)


__all__ = ["with_options"]
