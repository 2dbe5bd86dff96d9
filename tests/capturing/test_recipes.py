"""How the values of captured inputs are made, by what reads them."""

from __future__ import annotations

import torch
from torch import fx

from tcverify.capturing.recipes import recipe_of
from tcverify.ops import TensorSpec
from tcverify.program import Recipe

aten = torch.ops.aten


def test_integers_are_valid_for_all_tables_that_they_index() -> None:
    graph = fx.Graph()
    spec = TensorSpec.contiguous((4,), torch.int64)
    index = graph.placeholder("index")
    index.meta["val"] = spec
    for rows in (7, 3, 5):
        table = graph.placeholder(f"table{rows}")
        table.meta["val"] = TensorSpec.contiguous((rows, 2), torch.float32)
        graph.call_function(aten.embedding.default, (table, index))
    assert recipe_of(index, spec, "input", None) == Recipe("integers", 3.0)


def test_integers_that_index_nothing_stay_in_the_range_of_those_seen() -> None:
    graph = fx.Graph()
    spec = TensorSpec.contiguous((3,), torch.int64)
    index = graph.placeholder("index")
    index.meta["val"] = spec
    assert recipe_of(index, spec, "input", torch.tensor([0, 8, 2])) == Recipe("integers", 9.0)
    assert recipe_of(index, spec, "input", torch.tensor([0, 8, 2], dtype=torch.uint32)) == Recipe("integers", 9.0)
    assert recipe_of(index, spec, "input", torch.tensor([0, -100, 2])).values == (0, -100, 2)
