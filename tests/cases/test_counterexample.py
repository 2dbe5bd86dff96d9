"""Counterexample files: exact, atomic, bounded, found by id."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import fx

from tcverify.application import PassFacts
from tcverify.cases.counterexample import (
    Counterexample,
    RankValue,
    case_id,
    collect_versions,
    decode_counterexample,
    encode_counterexample,
    find_counterexamples,
    make_counterexample,
    read_counterexample,
    write_counterexample,
)
from tcverify.errors import ProgramError, UsageError
from tcverify.program import Contract, Finding, dumps
from tcverify.verification.verifier import verify
from tests.support.programs import reduce_then_norm

FACTS = PassFacts("mine", "mine.py:Pass", {"k": "v"}, "abc", {"idempotent": False})


def some_case(**changes: Any) -> Counterexample:
    program = reduce_then_norm()
    finding = Finding(
        "wrong-value", "equivalence", "output 0 is wrong", "at [0, 0]", "rms_norm", 1, {"label": "output 0"}
    )
    case = Counterexample(
        id=case_id(program, FACTS, finding.kind),
        program=program,
        rewritten=program,
        listing="",
        facts=FACTS,
        finding=finding,
        others=(Finding("stale-metadata", "metadata", "wrong shape"),),
        values=(RankValue(0, "output 0", (1, 2), 1.5, -2.5),),
        executors=("lockstep", "gloo"),
        contract=Contract(idempotent=True),
        size_drawn=17,
        shrink_cut=True,
        deep=True,
        pass_timeout=1.5,
        environment=collect_versions(),
    )
    return replace(case, **changes)


def _fields(case: Counterexample) -> dict[str, Any]:
    return {**vars(case), "program": dumps(case.program), "rewritten": case.rewritten and dumps(case.rewritten)}


def test_it_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    case = some_case()
    path = write_counterexample(case, tmp_path)
    assert path == tmp_path / case.id / "counterexample.json"
    assert _fields(read_counterexample(path)) == _fields(case)


def test_without_a_rewritten_program_too(tmp_path: Path) -> None:
    case = some_case(rewritten=None, listing="graph():\n    return x")
    assert _fields(read_counterexample(write_counterexample(case, tmp_path))) == _fields(case)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_json_does_not_have_come_back(tmp_path: Path, value: float) -> None:
    case = some_case(values=(RankValue(0, "output 0", (), 0.0, value),))
    path = write_counterexample(case, tmp_path)
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert str(read_counterexample(path).values[0].actual) == str(value)


def test_texts_of_others_come_back(tmp_path: Path) -> None:
    nasty = 'a"b\\c\n```\x1b[31m\x00\ud800\u202e</script>'
    finding = Finding("pass-raised", "application", nasty, nasty)
    assert read_counterexample(write_counterexample(some_case(finding=finding), tmp_path)).finding == finding


def test_the_id_depends_on_program_pass_options_and_kind() -> None:
    program = reduce_then_norm()
    known = {
        case_id(program, FACTS, "wrong-value"),
        case_id(program, FACTS, "deadlock"),
        case_id(replace(program, seed=2), FACTS, "wrong-value"),
        case_id(program, replace(FACTS, target="other:Pass"), "wrong-value"),
        case_id(program, replace(FACTS, options={"k": "w"}), "wrong-value"),
    }
    assert len(known) == 5


def test_the_id_does_not_depend_on_anything_else() -> None:
    again = replace(FACTS, name="other", source="def", contract={})
    assert case_id(reduce_then_norm(), again, "wrong-value") == case_id(reduce_then_norm(), FACTS, "wrong-value")


def _without_reduction(gm: fx.GraphModule) -> None:
    for node in list(gm.graph.nodes):
        if "all_reduce" in str(node.target):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)


def test_it_is_made_of_a_verdict() -> None:
    program = reduce_then_norm()
    verdict = verify(_without_reduction, program)
    case = make_counterexample(verdict, "wrong-value", FACTS, Contract())
    assert case.finding in verdict.findings
    assert case.finding not in case.others
    assert len(case.others) == len(verdict.findings) - 1
    assert case.executors == ("lockstep",)
    assert [value.rank for value in case.values] == [0, 1]
    assert case.size_drawn == program.size


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "is not a tcverify counterexample"),
        ({"version": 2}, "has version 2"),
        ({"id": "/etc/passwd"}, "is not an id"),
        ({"id": "ABCDEF01"}, "is not an id"),
        ({"size_drawn": True}, "is not of type int"),
        ({"deep": 1}, "is not of type bool"),
        ({"others": None}, "malformed counterexample"),
        ({"others": [{"kind": "x"}]}, "it lacks 'check'"),
        ({"environment": {"a": 1}}, "is not of type str"),
        ({"environment": []}, "malformed counterexample"),
        ({"pass_timeout": 0}, "is not a time-out"),
        ({"contract": {"unknown": True}}, "malformed counterexample"),
        ({"contract": {"idempotent": "yes"}}, "the promise idempotent is 'yes'"),
        ({"values": [{"rank": 0, "label": "x", "index": [], "expected": "much", "actual": 0}]}, "malformed"),
        ({"program": {}}, "program is not a tcverify program"),
        ({"rewritten": 3}, "rewritten is not a tcverify program"),
    ],
)
def test_damaged_files_say_where(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ProgramError, match=r"^the file") as caught:
        decode_counterexample({**encode_counterexample(some_case()), **changes}, "the file")
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 2}, "about rank 2 of 2"),
        ({"rank": -1}, "about rank -1 of 2"),
        ({"rank": "0"}, "is not of type int"),
        ({"node": 3}, "is not of type str"),
        ({"title": None}, "is not of type str"),
        ({"data": []}, "is not of type dict"),
        ({"surprise": 1}, "unknown fields"),
    ],
)
def test_damaged_findings_too(changes: dict[str, Any], message: str) -> None:
    data = encode_counterexample(some_case())
    data["finding"] = {**data["finding"], **changes}
    with pytest.raises(ProgramError, match="malformed counterexample") as caught:
        decode_counterexample(data, "the file")
    assert message in caught.value.message


def test_every_missing_key_is_named() -> None:
    data = encode_counterexample(some_case())
    for key in data.keys() - {"rewritten"}:
        with pytest.raises(ProgramError):
            decode_counterexample({k: v for k, v in data.items() if k != key}, "the file")


# -------------------------------------------------------------------------------------------------------------- files


def test_a_large_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcverify.cases.counterexample.MAX_BYTES", 10)
    path = tmp_path / "x.json"
    path.write_text(" " * 11)
    with pytest.raises(ProgramError, match="has 11 bytes; at most 10"):
        read_counterexample(path)


def test_cases_are_found_by_file_directory_and_the_beginning_of_an_id(tmp_path: Path) -> None:
    case = some_case()
    path = write_counterexample(case, tmp_path)
    for where in (str(path), str(path.parent), str(tmp_path), case.id, case.id[:3]):
        assert find_counterexamples(where, tmp_path) == [path]


def test_all_cases_of_a_directory_are_found(tmp_path: Path) -> None:
    paths = [write_counterexample(some_case(id=name), tmp_path) for name in ("aa000000", "ab000000")]
    assert find_counterexamples(str(tmp_path), tmp_path) == paths
    with pytest.raises(UsageError, match="'a' matches 2"):
        find_counterexamples("a", tmp_path)


@pytest.mark.parametrize("where", ["zz", "../x", "*", "", "a\0b"])
def test_nothing_is_found_for_anything_else(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    write_counterexample(some_case(), tmp_path / "reports")
    with pytest.raises(UsageError):
        find_counterexamples(where, tmp_path / "reports")
