"""Which anchor a diagnosis names when an op runs on another stream by position than by data flow."""

from __future__ import annotations

from typing import Any

import pytest
from torch import fx

from tcverify.explain.diagnosis import diagnose
from tests.support.lowered import Build, Lowering, findings, program


def joined(b: Lowering, value: fx.Node, stream: int) -> fx.Node:
    return b.wait(value, 0, b.record(value, stream))


def record_behind_another(b: Lowering) -> Any:
    gated = b.wait(b.x, 1)
    product = b.mm(gated)
    other = b.call("aten::neg", b.y)
    return b.wait(product, 0, b.record(product, 1)), other


def wait_before_another(b: Lowering) -> Any:
    gated = b.wait(b.x, 1)
    other = b.call("aten::neg", b.y)
    return joined(b, b.relu(gated), 1), other


def wait_of_a_first_reader(b: Lowering) -> Any:
    product = b.mm(b.x)
    gated = b.wait(product, 1, b.record(product))
    first = b.relu(gated)
    mark = b.record(first, 1)
    second = b.call("aten::neg", gated)
    return b.wait(first, 0, mark), b.wait(second, 0, mark)


def record_behind_a_wait(b: Lowering) -> Any:
    out = b.call("aten::zeros", [4, 4])
    gated = b.relu(b.wait(b.x, 0))
    token = b.record(out, 1)
    return gated, b.wait(out, 0, token)


def dead_wait(b: Lowering) -> Any:
    b.wait(b.y, 2)
    return joined(b, b.relu(b.x), 0)


BUILDS: dict[str, tuple[Build, str]] = {
    "a record behind another op": (
        record_behind_another,
        "'_internal_record' is a record of 'mm': it stands behind 'neg'",
    ),
    "a wait before another op": (
        wait_before_another,
        "'_internal_wait_and_bind' is a wait for 'relu': it stands before 'neg'",
    ),
    "a wait of an earlier reader": (
        wait_of_a_first_reader,
        "'_internal_wait_and_bind' is a wait for 'relu', 'neg': 'relu' stands between it and 'neg', which reads it",
    ),
    "a record that comes late": (
        record_behind_a_wait,
        "'_internal_record' is a record of 'zeros': it stands behind 'relu'",
    ),
    "a wait whose result is unused": (
        dead_wait,
        "'_internal_wait_and_bind' is a wait whose result is unused: it stands before 'relu'",
    ),
}


@pytest.mark.parametrize("case", BUILDS)
def test_the_anchor_that_binds_otherwise_is_named(case: str) -> None:
    build, text = BUILDS[case]
    found = next(f for f in findings(build) if f.kind == "anchor-mismatch" and f.data["aspect"] == "stream")
    assert str(diagnose(program(build), program(build), found).first) == text


def test_a_record_that_the_finding_names_is_left_to_it() -> None:
    def build(b: Lowering) -> Any:
        product = b.mm(b.x)
        b.call("aten::neg", b.y)
        return b.wait(product, 1, b.record(product))

    found = next(f for f in findings(build) if f.data.get("aspect") == "record")
    assert diagnose(program(build), program(build), found).first is None
    assert found.node == "_internal_record"
