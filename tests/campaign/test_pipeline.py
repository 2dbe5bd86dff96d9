"""Several programs under way at once: in which order, and that none is lost."""

from collections.abc import Iterator
from typing import Any

from tcverify.application import Pair
from tcverify.campaign.pipeline import InFlightProgram, Pipeline
from tcverify.program import Program
from tcverify.verification.verifier import Phase, Verdict
from tests.support.programs import reduce_then_norm


def _flight(name: str, steps: int, log: list[str]) -> InFlightProgram:
    """A verification of so many steps, which notes each."""
    program = reduce_then_norm()

    def verification() -> Any:
        for number, phase in zip(range(1, steps), Phase, strict=False):
            log.append(f"{name}{number}")
            yield phase
        log.append(f"{name}{steps}")
        return Verdict("passed", [], [], Pair(program))

    return InFlightProgram(program, False, verification())


def _run(flights: list[InFlightProgram]) -> Iterator[InFlightProgram]:
    pipeline = Pipeline(InFlightProgram.advance, lambda flight: None)
    for flight in flights:
        yield from pipeline.answer()
        yield from pipeline.feed(flight)
    while len(pipeline):
        yield from pipeline.answer()
        yield from pipeline.feed(None)


def test_programs_come_out_in_order_whole() -> None:
    log: list[str] = []
    flights = [_flight(name, 5, log) for name in "abcd"]
    assert list(_run(flights)) == flights
    assert sorted(log) == [f"{name}{number}" for name in "abcd" for number in range(1, 6)]


def test_a_program_is_given_to_the_pass_when_it_has_answered_about_the_one_before() -> None:
    log: list[str] = []
    list(_run([_flight(name, 5, log) for name in "abc"]))
    assert log.index("a3") < log.index("b1") < log.index("a4")  # b is with the pass while a runs here
    assert log.index("b4") < log.index("a5")  # a is on the process group while b runs here


def test_programs_that_end_early_are_not_lost() -> None:
    log: list[str] = []
    flights = [_flight(name, steps, log) for name, steps in zip("abcdef", (5, 1, 2, 3, 4, 5), strict=True)]
    done = list(_run(flights))
    assert sorted(map(id, done)) == sorted(map(id, flights))
    assert all(flight.verdict is not None for flight in done)


def test_what_the_pass_says_all_about_is_out_before_the_next_goes_in() -> None:
    log: list[str] = []
    hangs, next_one = _flight("a", 3, log), _flight("b", 5, log)
    pipeline = Pipeline(InFlightProgram.advance, lambda flight: None)
    pipeline.feed(hangs)
    assert pipeline.answer() == [hangs]
    assert not len(pipeline)
    assert pipeline.feed(next_one) == []
    assert "b1" in log


def test_the_program_that_this_process_works_on_is_noted_first() -> None:
    noted: list[Program] = []
    log: list[str] = []
    pipeline = Pipeline(InFlightProgram.advance, lambda flight: noted.append(flight.program))
    first, second = _flight("a", 5, log), _flight("b", 5, log)
    pipeline.feed(first)
    assert noted == [first.program]
    pipeline.answer()
    pipeline.feed(second)
    assert noted == [first.program, second.program]
