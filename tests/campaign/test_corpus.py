"""The corpus: what it keeps, what it gives back, and what does not bother it."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import fx

from tcverify.application import InProcess
from tcverify.application.loading import prepare_pass
from tcverify.campaign import Campaign, CampaignFinished, CampaignPlan, Corpus, CorpusCase
from tcverify.campaign import corpus as corpus_module
from tcverify.campaign.corpus import NAMED, reasons_of
from tcverify.errors import UsageError
from tcverify.passes import SequenceParallel
from tcverify.program import dumps
from tcverify.strategies import transformer_programs
from tests.support.programs import reduce_then_norm

TARGET, MESH = "mine:Pass", "2 ranks"


def silent(line: str) -> None:
    raise AssertionError(f"nothing was to be told, but: {line}")


def case(seed: int = 0, *reasons: str, kind: str = "") -> CorpusCase:
    return CorpusCase(TARGET, MESH, replace(reduce_then_norm(), seed=seed), reasons or (f"reason {seed}",), kind)


def test_cases_come_back_as_they_were(tmp_path: Path) -> None:
    kept = case(1, "wrong-value: norm is #", kind="wrong-value")
    assert Corpus(tmp_path, silent).add(kept)
    (found,) = Corpus(tmp_path, silent).cases(TARGET, MESH)
    assert (found.reasons, found.kind, found.deep) == (kept.reasons, kept.kind, kept.deep)
    assert dumps(found.program) == dumps(kept.program)
    assert Corpus(tmp_path, silent).cases(TARGET, "4 ranks") == Corpus(tmp_path, silent).cases("other:Pass", MESH) == []


def test_a_reason_is_kept_once(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path, silent)
    assert corpus.add(case(1, "a", "b"))
    assert not corpus.add(case(2, "b"))
    assert corpus.add(case(3, "b", "c"))
    assert not Corpus(tmp_path, silent).add(case(4, "a"))
    assert len(list(tmp_path.iterdir())) == 2


def test_findings_come_first_and_each_reason_once(tmp_path: Path) -> None:
    first, second = Corpus(tmp_path, silent), Corpus(tmp_path, silent)  # two campaigns, neither knows of the other
    assert first.add(case(1, "a"))
    assert second.add(case(2, "a"))
    assert second.add(case(3, "wrong-value: x", kind="wrong-value"))
    found = first.cases(TARGET, MESH)
    assert [one.kind for one in found] == ["wrong-value", ""]
    assert len(list(tmp_path.iterdir())) == 3


def test_many_writers_need_no_coordination(tmp_path: Path) -> None:
    def write(writer: int) -> None:
        corpus = Corpus(tmp_path, silent)
        for seed in range(8):
            corpus.add(case(seed))

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(tmp_path.iterdir())) == 8  # the same content has the same name
    assert len(Corpus(tmp_path, silent).cases(TARGET, MESH)) == 8


def damaged(path: Path, how: str) -> None:
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:-20])
    elif how == "flipped":
        path.write_bytes(path.read_bytes().replace(b'"deep":false', b'"deep":true '))
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "a directory":
        path.unlink()
        path.mkdir()
    elif how == "unreadable link":
        path.unlink()
        path.symlink_to(path.parent / "nowhere")
    elif how == "renamed":
        path.rename(path.with_name(f"{'0' * 32}.json"))
    elif how == "a pipe":
        path.unlink()
        os.mkfifo(path)
    elif how == "a link to itself":
        path.unlink()
        path.symlink_to(path)


@pytest.mark.parametrize(
    "how", ["truncated", "flipped", "empty", "a directory", "unreadable link", "renamed", "a pipe", "a link to itself"]
)
def test_a_damaged_case_is_named_and_left_out(tmp_path: Path, how: str) -> None:
    corpus = Corpus(tmp_path, silent)
    corpus.add(case(1))
    (path,) = tmp_path.iterdir()
    corpus.add(case(2))
    damaged(path, how)
    told: list[str] = []
    found = Corpus(tmp_path, told.append).cases(TARGET, MESH)
    assert [one.reasons for one in found] == [("reason 2",)]
    (line,) = told
    assert ("0" * 32 if how == "renamed" else path.name) in line
    assert "skipped" in line


def rehashed(tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A case whose name is right and whose content is not."""
    data = corpus_module.encode_case(case(1))
    text = json.dumps(change(data) or data).encode()
    path = tmp_path / f"{corpus_module._hash(text)}.json"
    path.write_bytes(text)
    return path


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda d: d.update(version=2), "version 2"),
        (lambda d: d.update(format="other"), "not a case"),
        (lambda d: d.update(reasons=[1]), "malformed"),
        (lambda d: d.pop("pass") and None, "malformed"),
        (lambda d: d.update(deep=1), "malformed"),
        (lambda d: d["program"].update(graphs=[]), "graph"),
        (lambda d: d["program"]["mesh"].update(world_size=3), "mesh"),
        (lambda d: [d], "not a case"),
    ],
)
def test_a_foreign_case_is_named_and_left_out(tmp_path: Path, change: Any, what: str) -> None:
    path = rehashed(tmp_path, change)
    told: list[str] = []
    corpus = Corpus(tmp_path, told.append)
    assert corpus.cases(TARGET, MESH) == []
    (line,) = told
    assert path.name in line
    assert what in line
    assert corpus.cases(TARGET, MESH) == []
    assert len(told) == 1


def test_many_foreign_files_do_not_flood_the_terminal(tmp_path: Path) -> None:
    for number in range(50):
        (tmp_path / f"notes-{number}.txt").write_text("x")
    told: list[str] = []
    Corpus(tmp_path, told.append)
    assert len(told) == NAMED + 1


def test_what_is_being_written_is_not_read(tmp_path: Path) -> None:
    (tmp_path / ".abc.json.x1").write_text("half a ca")
    assert Corpus(tmp_path, silent).cases(TARGET, MESH) == []


def test_a_place_that_is_no_directory_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be used"):
        Corpus(tmp_path / "file", silent)


def test_a_case_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    told: list[str] = []
    corpus = Corpus(tmp_path / "corpus", told.append)
    (tmp_path / "corpus").rmdir()
    (tmp_path / "corpus").write_text("")  # for root, too
    assert not corpus.add(case(1))
    assert not corpus.add(case(2))
    (line,) = told
    assert "the run continues" in line


def test_reasons_are_patterns_by_features() -> None:
    assert reasons_of(["p", "p"], ["b", "a"]) == ["p × a", "p × b"]
    assert reasons_of(["p"], []) == ["p × any program"]
    assert reasons_of([], ["a"]) == []


# ----------------------------------------------------------------------------------------------------------- campaigns


def drops_reductions(gm: fx.GraphModule) -> None:
    for node in [n for n in gm.graph.nodes if n.op == "call_function" and "all_reduce" in str(n.target)]:
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)


def run(pass_: Any, place: Path, **plan: Any) -> tuple[CampaignFinished, Corpus]:
    subject = InProcess(prepare_pass(pass_, TARGET, {}))
    corpus = Corpus(place / "corpus", silent)
    options = {
        "programs": transformer_programs(world_size=2),
        "max_examples": 20,
        "seed": 1,
        "shrink_time": 0.5,
        **plan,
    }
    plan_ = CampaignPlan(
        mesh=MESH, report_dir=place / "reports", state_dir=place / "state", corpus=corpus, earlier=False,
        first=corpus.cases(TARGET, MESH), **options,
    )  # fmt: skip
    return Campaign(subject, plan_, None).run(), corpus


@pytest.fixture(scope="module")
def dropping(tmp_path_factory: pytest.TempPathFactory) -> tuple[CampaignFinished, Path]:
    """A campaign whose pass drops reductions, and where it has left its corpus."""
    place = tmp_path_factory.mktemp("dropping")
    return run(drops_reductions, place)[0], place


def test_a_finding_is_found_again_from_the_corpus_alone(
    dropping: tuple[CampaignFinished, Path], tmp_path: Path
) -> None:
    first, place = dropping
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    corpus = Corpus(tmp_path / "corpus", silent)
    assert first.verdict == "refuted"
    kinds = {one.kind for one in corpus.cases(TARGET, MESH)} - {""}
    assert kinds == {found.finding.kind for found in first.counterexamples}
    again, _ = run(drops_reductions, tmp_path, max_examples=0)
    # a shrunk program may show yet another kind
    assert {found.id for found in again.counterexamples} >= {found.id for found in first.counterexamples}


def test_cases_are_tried_beside_the_programs_that_are_asked_for(tmp_path: Path) -> None:
    _, corpus = run(SequenceParallel, tmp_path, max_examples=30)
    known = corpus.cases(TARGET, MESH)
    assert known
    assert all(" × " in reason for one in known for reason in one.reasons)
    again, _ = run(SequenceParallel, tmp_path, max_examples=5, seed=2)
    assert again.statistics.programs == again.statistics.passed == len(known) + 5


def test_a_pass_that_changes_nothing_leaves_nothing(tmp_path: Path) -> None:
    finished, corpus = run(lambda gm: None, tmp_path)
    assert (finished.verdict, corpus.cases(TARGET, MESH)) == ("nothing tested", [])


def test_a_damaged_corpus_is_no_reason_to_pass(dropping: tuple[CampaignFinished, Path], tmp_path: Path) -> None:
    shutil.copytree(dropping[1], tmp_path, dirs_exist_ok=True)
    for path in (tmp_path / "corpus").iterdir():
        damaged(path, "flipped")
    told: list[str] = []
    cases: list[CorpusCase] = Corpus(tmp_path / "corpus", told.append).cases(TARGET, MESH)
    assert told
    assert cases == []
    subject = InProcess(prepare_pass(drops_reductions, TARGET, {}))
    where = {"report_dir": tmp_path / "reports", "state_dir": tmp_path / "state"}
    plan = CampaignPlan(transformer_programs(world_size=2), MESH, **where, max_examples=0, first=cases, earlier=False)
    assert Campaign(subject, plan, None).run().verdict == "nothing tested"
