"""What is drawn for compilers is combined: results of one part are operands of the next."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache

from torch import fx

from tcverify.ops import lookup, qualified_name
from tcverify.program import Program
from tcverify.strategies import DECODERS, all_meshes

WAIT = "_c10d_functional::wait_tensor"


@cache
def sample(strategy: str, count: int) -> list[Program]:
    generator, decoder = random.Random(5), DECODERS[strategy]
    return [
        decoder.decode(generator.choice(all_meshes(2 + number % 3)), generator.randbytes(decoder.width))
        for number in range(count)
    ]


def calls(program: Program, op: str) -> list[fx.Node]:
    return [node for node in program.graphs[0].nodes if qualified_name(node.target) == op]


def started(node: fx.Node) -> str:
    """The collective that a wait is for; nothing of any other node."""
    found = node.args[0] if qualified_name(node.target) == WAIT else None
    return qualified_name(found.target).partition("::")[2] if isinstance(found, fx.Node) else ""


def test_products_read_products_and_gathered_values() -> None:
    read: list[str] = []
    for program in sample("compiled", 600):
        for product in calls(program, "aten::mm"):
            operand = product.args[0]
            assert isinstance(operand, fx.Node)
            read.append(started(operand) or qualified_name(operand.target))
    assert read.count("aten::mm") > 3
    assert read.count("all_gather_into_tensor") > 100
    assert len(set(read)) > 10


def test_a_product_stands_between_two_collectives() -> None:
    chains = set()
    for program in sample("compiled", 600):
        for product in calls(program, "aten::mm"):
            operand = product.args[0]
            ends = {qualified_name(user.target).partition("::")[2] for user in product.users}
            chains |= {(started(operand), end) for end in ends if isinstance(operand, fx.Node)}
    assert {
        ("all_gather_into_tensor", "reduce_scatter_tensor"),
        ("all_gather_into_tensor", "all_gather_into_tensor"),
    } <= chains


def test_results_of_two_collectives_are_summed_and_may_broadcast() -> None:
    summed = []
    for program in sample("bucketing", 400):
        for add in calls(program, "aten::add.Tensor"):
            one, other = add.args
            if isinstance(one, fx.Node) and isinstance(other, fx.Node) and started(one) == started(other) != "":
                summed.append((started(one), one.meta["val"].shape == other.meta["val"].shape))
    for kind in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
        assert {alike for name, alike in summed if name == kind} == {True, False}


def test_programs_for_bucketing_have_several_collectives_that_fit_one_bucket() -> None:
    alike: Counter[str] = Counter()
    programs = sample("bucketing", 400)
    for program in programs:
        keys = Counter(
            (qualified_name(node.target).split("::")[1].split(".")[0], str(node.args[1:]), node.meta["val"].dtype)
            for node in program.graphs[0].nodes
            if node.op == "call_function" and lookup(node.target).phase == "start"
        )
        alike.update({name for (name, *_), count in keys.items() if count > 2})
    assert min(alike[name] for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")) > 60


def test_multiples_of_one_value_are_added_to_another_either_way() -> None:
    """An op that is fused into another one has arguments which the other may not take, such as alpha."""
    forms = set()
    for program in sample("compiled", 600):
        for name in ("add", "sub"):
            for node in calls(program, f"aten::{name}.Tensor"):
                operands = [qualified_name(arg.target) if isinstance(arg, fx.Node) else "" for arg in node.args]
                at = operands.index("aten::mm") if "aten::mm" in operands else None
                forms.add((name, node.kwargs.get("alpha", 1), at))
    assert {(name, alpha, None) for name in ("add", "sub") for alpha in (1, 2)} <= forms
    assert {("add", 1, 0), ("add", 1, 1), ("add", 2, 0), ("add", 2, 1)} <= forms
