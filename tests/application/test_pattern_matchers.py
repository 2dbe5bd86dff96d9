"""PyTorch's pattern matchers ask for what they rewrite inside a block, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch.fx.passes.utils.matcher_utils import SubgraphMatcher

from tcverify.application.pattern_matchers import ask_before_matches
from tcverify.program import count_rewrites


def test_matchers_are_as_before_behind_the_block() -> None:
    before = SubgraphMatcher.match
    with ask_before_matches():
        assert SubgraphMatcher.match is not before
    assert SubgraphMatcher.match is before
    with pytest.raises(ZeroDivisionError), ask_before_matches():
        raise ZeroDivisionError
    assert SubgraphMatcher.match is before


def pattern(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x)


def replacement(x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x)


@pytest.mark.parametrize("allowed", [None, frozenset()])
def test_matches_are_asked_for_one_by_one(allowed: frozenset | None) -> None:
    module = fx.symbolic_trace(lambda x: torch.relu(torch.relu(x)))
    with ask_before_matches(), count_rewrites(allowed) as asked:
        fx.replace_pattern(module, pattern, replacement)
    assert [one.pattern for one in asked] == ["replace_pattern"] * 2
    left = [node.target for node in module.graph.nodes if node.op == "call_function"]
    assert left == [torch.sigmoid if allowed is None else torch.relu] * 2
