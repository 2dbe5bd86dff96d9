"""Arithmetic and tables of `gpu_clocks.py`: rank correlation, shares, Markdown."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence


def ranks_of(numbers: Sequence[float]) -> list[float]:
    """The rank of each number, from 1; equal numbers share the mean of their ranks."""
    order = sorted(range(len(numbers)), key=lambda i: numbers[i])
    found = [0.0] * len(numbers)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and numbers[order[end]] == numbers[order[start]]:
            end += 1
        for i in order[start:end]:
            found[i] = (start + 1 + end) / 2
        start = end
    return found


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation; NaN where one side does not vary, or there are fewer than three pairs."""
    if len(first) < 3 or len(set(first)) == 1 or len(set(second)) == 1:
        return math.nan
    return statistics.correlation(ranks_of(first), ranks_of(second))


def within(ratios: Sequence[float], factor: float) -> float:
    """The share of ratios of at most this factor, up or down; NaN of none."""
    return statistics.fmean(1 / factor <= ratio <= factor for ratio in ratios) if ratios else math.nan


def median(numbers: Sequence[float]) -> float:
    """The median; NaN of none."""
    return statistics.median(numbers) if numbers else math.nan


def quartiles(numbers: Sequence[float]) -> tuple[float, float]:
    """The first and the third quartile."""
    if len(numbers) < 2:
        return numbers[0], numbers[0]
    first, _, third = statistics.quantiles(numbers, n=4, method="inclusive")
    return first, third


def number(value: float, form: str = ".2f") -> str:
    """A number in a table; "–" for NaN."""
    return "–" if math.isnan(value) else f"{value:{form}}"


def micro(seconds: float) -> str:
    """Seconds as microseconds."""
    return number(1e6 * seconds, ".1f" if seconds < 1e-4 else ".0f")


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table, with an empty line before and behind it."""
    lines = ["", "| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([*lines, ""])


def problems(refused: Counter[str], what: str, wrong: Sequence[str], differs: str) -> list[str]:
    """What could not be measured, by reason, and what came out otherwise than it has to."""
    lines = []
    if refused:
        lines += ["Not measured:", markdown(("why", what), refused.most_common(15))]
    if wrong:
        lines += [differs, "\n".join(["", *(f"- {one}" for one in wrong[:15]), ""])]
    return lines


def reason(error: BaseException) -> str:
    """The first line of an error, whatever numbers it has."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {re.sub(r'[0-9]+', 'N', said[0][:160]) if said else ''}"
