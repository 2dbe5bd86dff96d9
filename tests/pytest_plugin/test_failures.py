"""One class of exceptions per kind of finding, and Hypothesis profiles that mind their own business."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st

import tcverify
from tcverify.application import InProcess
from tcverify.application.loading import prepare_pass
from tcverify.campaign import Campaign, CampaignFinished, CampaignPlan, Event, Progress
from tcverify.passes import Identity
from tcverify.program import KINDS, Program, program_id
from tcverify.pytest_plugin import failures, profiles
from tcverify.strategies import transformer_programs


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_class(kind: str) -> None:
    name = "".join(part.capitalize() for part in kind.split("-"))
    found = getattr(failures, name)
    assert found is failures.refuted_by(kind)
    assert issubclass(found, tcverify.Refuted)
    assert (found.__name__, found.kind) == (name, kind)


def test_other_names_do_not_exist() -> None:
    with pytest.raises(AttributeError, match="WrongValu"):
        getattr(failures, "WrongValu")  # noqa: B009 - type checkers would miss it


@pytest.mark.parametrize("name", profiles.PROFILES)
def test_profiles_are_known_to_hypothesis(name: str) -> None:
    profile = settings.get_profile(f"tcverify-{name}")
    assert profile.max_examples == profiles.PROFILES[name].max_examples
    assert (profile.deadline, profile.database, profile.derandomize) == (None, None, False)


# ------------------------------------------------------------------------------------------- campaigns under Hypothesis


@pytest.fixture
def odd_profile() -> Iterator[None]:
    before = settings.get_current_profile_name()
    settings.register_profile("odd", max_examples=3, derandomize=True, stateful_step_count=1, deadline=1)
    settings.load_profile("odd")
    yield
    settings.load_profile(before)


def campaign(directory: Path, **options: Any) -> tuple[CampaignFinished, list[str]]:
    drawn: list[str] = []

    def note(program: Program) -> Program:
        drawn.append(program_id(program))
        return program

    arguments = {"programs": transformer_programs(world_size=2).map(note), "seed": 3, "max_examples": 8, **options}
    subscribers = arguments.pop("subscribers", ())
    plan = CampaignPlan(mesh="2 ranks", report_dir=directory / "reports", state_dir=directory / "state", **arguments)
    finished = Campaign(InProcess(prepare_pass(Identity, "", {})), plan, None, subscribers).run()
    return finished, drawn


@pytest.fixture
def usual(tmp_path: Path) -> list[str]:
    return campaign(tmp_path / "usual")[1]


def test_a_profile_of_the_user_changes_no_campaign(usual: list[str], odd_profile: None, tmp_path: Path) -> None:
    finished, drawn = campaign(tmp_path)
    assert finished.statistics.programs == 8
    assert drawn == usual


def test_a_strategy_that_rejects_everything_ends_a_campaign(tmp_path: Path) -> None:
    finished, _ = campaign(tmp_path, programs=st.integers().filter(lambda _: False))
    assert (finished.verdict, finished.stop) == ("nothing tested", "exhausted")


def test_the_time_out_of_a_test_runner_ends_a_campaign(tmp_path: Path) -> None:
    def times_out(event: Event) -> None:
        if isinstance(event, Progress) and event.statistics.programs == 2:
            pytest.fail("Timeout >1.0s")

    with pytest.raises(pytest.fail.Exception, match="Timeout"):
        campaign(tmp_path, subscribers=[times_out])
    assert not list((tmp_path / "state").glob("in-flight*"))
