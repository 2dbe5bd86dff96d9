"""Code that is partly reached, for the tests of coverage recording; its line numbers are given by `line`."""

from __future__ import annotations

from pathlib import Path


def line(text: str) -> int:
    """The line of this file that ends with a comment of this text."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, one in enumerate(lines, 1) if one.endswith(f"# {text}"))


def count(values: list[int], flag: bool) -> int:
    """Conditions in a loop."""
    found = 0  # first
    for value in values:
        if value > 3 and value < 10:  # between
            found += 1
        elif value == 100:  # hundred
            found -= 1  # minus
    while found > 50:  # while
        found -= 1  # down
    if (flag  # several
            and found):  # fmt: skip
        return found  # early
    if not flag:  # not flag
        found = 2  # two
    return found


def end(value: int) -> None:
    """A condition with nothing behind it."""
    if value:  # end
        print(end="")


def loop(values: list[int]) -> None:
    """A condition at the end of a loop."""
    for value in values:
        if value:  # loop
            print(end="")  # printed


def defines(value: int) -> object:
    """A condition before a definition with a decorator."""
    if value:  # defines

        @staticmethod
        def defined() -> None:
            pass

        return defined
    return None


def raises(value: int) -> int:
    """A condition that raises is neither true nor false."""
    if 1 // value:  # division
        return 1
    return 0


def answers(value: int) -> object:
    """What it returns is true or false by its form; a call of another function is not."""
    if value == 7:
        return end(value)
    return (value > 0  # answers
            and 12 // value < 5)  # fmt: skip


def never() -> int:
    """Not called."""
    return 1  # never


class Holder:
    """A class with a method."""

    def method(self) -> list[int]:
        """A comprehension with a condition, on several lines."""
        return [
            number  # number
            for number in range(3)
            if number
        ]
