"""docs/exact.md and the code name the same ops."""

from __future__ import annotations

import re
from pathlib import Path

from tcverify.checks.values.exact import NOT_BY_CHANCE
from tcverify.domains import DRAWS, MORE_DRAWS
from tcverify.domains.exact import field
from tcverify.domains.exact.indexing import CHOOSING, COMPARING
from tcverify.domains.exact.ops import EXACT

TEXT = (Path(__file__).parents[2] / "docs" / "exact.md").read_text(encoding="utf-8")


def test_the_table_of_ops_is_that_of_the_code() -> None:
    table = TEXT.split("## What each op keeps")[1].split("## What it costs")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(names) == sorted({*EXACT, *CHOOSING, *COMPARING})


def test_the_numbers_are_those_of_the_code() -> None:
    assert f"P = {field.P}" in TEXT
    assert f"from −{field.H} to {field.H}" in TEXT
    assert (DRAWS, MORE_DRAWS, NOT_BY_CHANCE) == (2, 6, 3)  # "two independent draws", "four more", "three of the six"
    assert field.BLOCK == 2**15
    assert field.MAX_DENOMINATOR == 10**8
