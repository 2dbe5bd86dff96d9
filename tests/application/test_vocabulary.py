"""What a pass names."""

from __future__ import annotations

import ast
import sys
import types
from pathlib import Path

import pytest

from tcverify.application.coverage.recorder import Scope
from tcverify.application.coverage.slicing import conditions_of
from tcverify.application.coverage.vocabulary import vocabulary_of
from tests.support import searched_passes

FILE = str(searched_passes.__file__)


def test_ops_are_found_in_modules_sets_and_aliases():
    named = vocabulary_of(Scope([FILE])).ops
    assert {"aten::neg", "tensor_cast::all_reduce", "aten::view", "aten::reshape", "aten::clone"} <= set(named)
    assert "python::getitem" in named
    assert "aten::tanh" in named  # a string that is the name of an op
    assert "aten::mm" not in named


def test_numbers_and_keys_are_found():
    found = vocabulary_of(Scope([FILE]))
    assert 3 in found.integers
    assert 0.25 in found.floats
    assert "seen" in found.keys


def test_conditions_name_the_ops_that_they_compare_with():
    lines = Path(FILE).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "in VIEWS" in text)
    assert vocabulary_of(Scope([FILE])).conditions[FILE, line] == ("aten::reshape", "aten::view")


def test_conditions_depend_on_what_their_variables_are_assigned_and_on_what_they_call():
    tree = ast.parse(
        """
def among(node):
    return node.target in CALLED

def f(graph):
    for node in graph.nodes:
        users = [user for user in node.users if user.target in ASSIGNED]
        if len(users) != LIMIT:
            continue
        found, where = among(node), ELSEWHERE
        if found is None:
            return

def g(users):
    while users:
        pass
"""
    )
    names = {
        line: [
            {part.id for one in parts for part in ast.walk(one) if isinstance(part, ast.Name)}
            for parts in (own, called)
        ]
        for line, own, called in conditions_of(tree)
    }
    assert names[8][0] >= {"users", "LIMIT", "ASSIGNED", "node", "graph"}
    assert names[8][1] == set()
    assert names[11][1] == {"node", "CALLED"}
    assert names[15] == [{"users"}, set()]  # those of another function do not count


def test_every_process_finds_the_same():
    assert vocabulary_of(Scope([FILE])) == vocabulary_of(Scope([FILE]))


def test_a_module_without_source_adds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "gone.py"
    path.write_text("def f():\n    return 7\n")
    scope, module = Scope([str(path)]), types.ModuleType("gone")
    assert scope.of(str(path)) is not None
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "gone", module)
    assert vocabulary_of(scope).integers == (7,)
    path.unlink()
    assert vocabulary_of(scope).integers == ()
