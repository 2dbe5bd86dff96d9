"""Programs with layouts that somebody has written by hand, and got wrong: a message, and no traceback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tcverify import verify
from tcverify.application import load_pass
from tcverify.cases.counterexample import make_counterexample, write_counterexample
from tcverify.program import PlacedBuilder
from tests.cli.conftest import pin, run_here

PASS = f"{Path(__file__).parents[2]}/docs/gather_in_rank_order.py:gather_in_rank_order"
LAYOUT = "[1, 0] replicated"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A counterexample whose only op takes a tensor to the layout `LAYOUT`."""
    directory = tmp_path_factory.mktemp("layouts")
    b = PlacedBuilder(2)
    program = b.build(b.set(b.input("x", (4, 4), "[1, 0] shard(0)"), LAYOUT))
    loaded = load_pass(PASS)
    verdict = verify(PASS, program)
    assert verdict.status == "refuted"
    case = make_counterexample(verdict, verdict.findings[0].kind, loaded.facts, loaded.contract)
    with pytest.MonkeyPatch.context() as patch:
        pin(patch, directory)
        yield write_counterexample(case, directory).read_text()


def test_the_counterexample_is_sound(text: str) -> None:
    Path("case.json").write_text(text)
    assert "FAILED" in run_here("replay", "case.json", "--confirm", "none").out
    assert "multidevice" in run_here("show", "case.json").out or "set_1" in run_here("show", "case.json").out


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("[1, 0] replicate", "is not a layout"),
        ("[1, 0] shard(7)", "shards dim 7 of a tensor of shape [4, 4]"),
        ("[1, 0, 2] replicated", "names rank 2, which the mesh does not have"),
        ("[[1, 0], [1]] replicated", "is not a mesh"),
        ("[1, 1] replicated", "names a rank twice"),
        ("[0, 1, 3] shard(0)", "cannot divide size 4 of dim 0 evenly by 3 ranks"),
        ("", "is not a layout"),
    ],
)
def test_what_is_said_of_a_wrong_layout(text: str, wrong: str, words: str) -> None:
    assert text.count(f'"{LAYOUT}"') >= 1
    Path("wrong.json").write_text(text.replace(f'"{LAYOUT}"', f'"{wrong}"'))
    outcome = run_here("replay", "wrong.json", "--confirm", "none", columns=400)
    shown = " ".join((outcome.out + outcome.err).split())
    assert outcome.code in (1, 2), outcome
    assert words in shown
    assert "set_1" in shown
    assert "Traceback" not in shown
    assert "should never happen" not in shown
    assert "Traceback" not in run_here("show", "wrong.json").err
