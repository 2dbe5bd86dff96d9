"""Looking ops up: names, callables, dialects of one's own, and what has no meaning here."""

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tcverify.errors import UnsupportedOp
from tcverify.execution import Lockstep
from tcverify.ops import Op, lookup, qualified_name, register_dialect, resolve
from tcverify.ops import table as tables
from tcverify.ops.dialects.tensor_cast.library import SCHEMAS
from tcverify.ops.dialects.tensor_cast.quantised import FUSED
from tcverify.program import InputSpec, Mesh, dumps, loads, spmd_program

aten = torch.ops.aten

# ------------------------------------------------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (aten.add.Tensor, "aten::add.Tensor"),
        (aten.relu.default, "aten::relu"),
        (aten.add, "aten::add"),
        (operator.getitem, "python::getitem"),
        (operator.add, "python::add"),
        (len, "foreign::builtins.len"),
        (torch.cat, "foreign::torch._VariableFunctionsClass.cat"),
        (Op, "foreign::tcverify.ops.op.Op"),
    ],
)
def test_a_target_has_a_qualified_name(target: Any, name: str) -> None:
    assert qualified_name(target) == name


@pytest.mark.parametrize(
    "name", [*(f"tensor_cast::{n}" for n in SCHEMAS), "aten::add.Tensor", "aten::mm", *tables.PYTHON_OPS]
)
def test_a_name_leads_to_the_callable_and_back(name: str) -> None:
    assert qualified_name(resolve(name)) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "add",
        "::",
        "aten::",
        "aten::no_such_op",
        "aten::add.NoSuchOverload",
        "aten::add_",  # has no default overload
        "aten::__class__",
        "aten::mm.__class__",
        "aten::add.Tensor.x",
        "python::eval",
        "python::__import__",
        "tensor_cast::no_such_op",
        "tensor_cast::rms_norm.other",
        "os::system",
        "foreign::builtins.eval",
        "prims::nothing",
    ],
)
def test_a_name_of_no_table_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedOp, match="is not supported") as error:
        resolve(name)
    assert error.value.op == name


# ------------------------------------------------------------------------------------------------------ lookup


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (aten.rand.default, "random"),
        (aten.from_file.default, "outside"),
        (aten.randn_like.default, "random"),
        (aten.bernoulli_.float, "random"),
        (aten.multinomial.default, "random"),
        (aten.normal_.default, "random"),
        (aten.resize_.default, "uninitialised"),
        (aten.nonzero.default, "depends on data"),
        (aten.masked_select.default, "depends on data"),
        (aten.where.default, "depends on data"),
        (aten.nonzero_numpy.default, "depends on data"),
        (aten.item.default, "depends on data"),
        (aten._local_scalar_dense.default, "depends on data"),
        (aten.add, "overload packet"),
        (torch.relu, "no dialect 'foreign'"),
        (torch.ops.prims.normal.default, "random"),
        (torch.ops.c10d.barrier.default, "takes an object"),
    ],
    ids=lambda value: value if isinstance(value, str) else qualified_name(value),
)
def test_an_op_without_a_meaning_says_why(target: Any, reason: str) -> None:
    op = lookup(target)
    assert op.run is None
    assert reason in op.reason
    with pytest.raises(UnsupportedOp, match=reason):
        op.require()


def test_an_op_of_a_known_dialect_without_a_meaning_is_named(own_dialect: str) -> None:
    with torch.library._scoped_library(own_dialect, "DEF") as library:
        library.define("later(Tensor x) -> Tensor")
        register_dialect(own_dialect, [], complete=True)
        op = lookup(getattr(torch.ops, own_dialect).later.default)
    assert op.name == f"{own_dialect}::later"
    assert op.run is None
    assert "gives it no meaning yet" in op.reason


def test_pure_aten_runs_as_it_is() -> None:
    op = lookup(aten.add.Tensor)
    assert op.run is aten.add.Tensor
    assert not op.aliases
    assert not op.collective


@pytest.mark.parametrize(
    "target", [aten.view.default, aten.add_.Tensor, aten.split.Tensor, aten.reshape.default, operator.getitem]
)
def test_views_and_in_place_ops_are_marked(target: Any) -> None:
    assert lookup(target).aliases


@pytest.mark.parametrize("target", [operator.add, operator.matmul, operator.neg, operator.lt])
def test_python_operators_make_new_values(target: Any) -> None:
    assert not lookup(target).aliases


@pytest.mark.parametrize(
    "name",
    [
        "all_reduce",
        "reduce_scatter",
        "all_gather",
        "all_to_all",
        "pipeline_send_recv",
        "matmul_all_reduce",
        *FUSED,
    ],
)
def test_collectives_are_marked(name: str) -> None:
    assert lookup(resolve(f"tensor_cast::{name}")).collective


def test_a_callable_that_has_no_hash_is_of_no_dialect() -> None:
    class Unhashable:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self) -> None: ...

    op = lookup(Unhashable())
    assert op.run is None
    assert op.name.startswith("foreign::")


# ------------------------------------------------------------------------------------------------------ own dialects


@pytest.fixture
def own_dialect() -> Iterator[str]:
    """The name of a dialect that is forgotten after the test."""
    yield "tcverify_test"
    tables._DIALECTS.pop("tcverify_test", None)
    vars(torch.ops).pop("tcverify_test", None)
    tables._LIBRARIES.pop("tcverify_test", None)
    tables._COMPLETE.discard("tcverify_test")
    tables._CACHE.clear()


def test_a_dialect_of_ones_own_works_end_to_end(own_dialect: str) -> None:
    with torch.library._scoped_library(own_dialect, "DEF") as library:

        def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
            return x * factor

        def load() -> None:
            library.define("scale(Tensor x, float factor) -> Tensor")
            library.impl("scale", scale, "CompositeExplicitAutograd")

        register_dialect(own_dialect, [Op("tcverify_test::scale", scale)], load)
        program = spmd_program(
            Mesh.grid({"tp": 2}),
            [InputSpec("x", (2, 3))],
            lambda b: b.call("tcverify_test::scale", b.input("x"), 3.0),
        )
        run = Lockstep().run(loads(dumps(program)))
        assert torch.equal(run.ranks[1].outputs[0], program.values(1)[0].double() * 3.0)


def test_a_dialect_is_loaded_once(own_dialect: str) -> None:
    loaded: list[str] = []
    register_dialect(own_dialect, [Op("tcverify_test::missing", None)], lambda: loaded.append(own_dialect))
    for _ in range(2):
        with pytest.raises(UnsupportedOp, match="this torch has no such op"):
            resolve("tcverify_test::missing")
    assert loaded == [own_dialect]


def test_a_dialect_replaces_the_meaning_of_an_op(own_dialect: str) -> None:
    with torch.library._scoped_library(own_dialect, "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        target = getattr(torch.ops, own_dialect).twice.default
        register_dialect(own_dialect, [Op("tcverify_test::twice", lambda x: x)])
        assert lookup(target).require()(1) == 1
        register_dialect(own_dialect, [Op("tcverify_test::twice", lambda x: 2 * x)])
        assert lookup(target).require()(1) == 2


def test_an_op_outside_its_dialect_is_refused(own_dialect: str) -> None:
    with pytest.raises(ValueError, match="op other::x does not belong to dialect tcverify_test"):
        register_dialect(own_dialect, [Op("other::x", None)])
