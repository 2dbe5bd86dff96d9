"""Ops of which only the signature is known: some function, the same everywhere; laws make two programs equal, or nothing does."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from tcverify import dumps, loads, verify
from tcverify.capturing import plain, program_of
from tcverify.domains import FLOAT64, Domain, Exact
from tcverify.errors import UnsupportedOp, UsageError
from tcverify.execution import Lockstep, ProcessGroupPool
from tcverify.ops import Group, lookup, resolve
from tcverify.program import VARYING, GraphBuilder, InputSpec, Mesh, Program, spmd_program
from tcverify.registry import extensions
from tcverify.registry.extensions import load_extension
from tcverify.registry.op_laws import OpLaw, read_op_laws, supposing
from tests.support import library_ops

OPS = torch.ops.tcverify_library
TP = Mesh.grid({"tp": 2})
Rewrite = Callable[[fx.GraphModule], None]


def op(name: str) -> Any:
    found = lookup(getattr(OPS, name).default)
    assert found.uninterpreted, found.reason
    return found.run


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, COS, SIN = drawn(2, 8, 4), drawn(8, 4, seed=1), drawn(8, 4, seed=2)


class TestTheFunction:
    def test_it_is_the_same_every_time_and_has_the_shape_that_the_fake_kernel_says(self) -> None:
        first, again = op("rope")(X, COS, SIN), op("rope")(X.clone(), COS, sin=SIN)
        assert torch.equal(first, again)
        assert first.shape == X.shape
        assert first.std() > 0.3

    def test_every_element_of_every_operand_counts(self) -> None:
        first = op("rope")(X, COS, SIN)
        for given in ((X, SIN, COS), (X.flip(1), COS, SIN), (X, COS, SIN + 1e-6)):
            assert not torch.allclose(op("rope")(*given), first, atol=1e-9, rtol=0)
        for index in ((0, 0, 0), (1, 7, 3)):
            other = X.clone()
            other[index] += 1e-6
            assert (op("rope")(other, COS, SIN) - first).abs().max() > 1e-9

    def test_what_is_no_tensor_counts_and_a_default_may_be_left_out(self) -> None:
        assert torch.equal(op("act")(X), op("act")(X, 1.0))
        assert not torch.allclose(op("act")(X), op("act")(X, 2.0))

    def test_rounding_stays_rounding(self) -> None:
        assert (op("act")(X * (1 + 2.0**-52)) - op("act")(X)).abs().max() < 1e-13

    def test_infinities_do_not_hide_the_rest(self) -> None:
        masked = X.clone()
        masked[0, 0, 0] = -torch.inf
        found = op("act")(masked)
        assert found.isfinite().all()
        assert not torch.allclose(found, op("act")(masked.flip(1)))

    def test_indices_are_in_range_and_layouts_are_kept(self) -> None:
        values, indices = op("top")(X[0], 3)
        assert (values.shape, indices.dtype) == ((8, 3), torch.int64)
        assert set(indices.flatten().tolist()) == {0, 1}
        assert op("turned")(X[0]).stride() == torch.empty_like(X[0].t()).stride()

    def test_what_the_schema_says_is_written_is_written(self) -> None:
        cache = torch.zeros(4, 3, dtype=torch.float64)
        assert op("store")(X, cache, torch.arange(2)) is None
        assert cache.abs().min() > 0

    def test_no_elements_are_no_obstacle(self) -> None:
        assert op("act")(X[:0]).shape == (0, 8, 4)

    @pytest.mark.parametrize("domain", [FLOAT64, Exact(0)], ids=["float64", "exact"])
    def test_it_vectorises(self, domain: Domain) -> None:
        many = domain.carry(torch.stack([X, X.flip(0)]).round())
        with domain.running():
            op("act")(many[0])
            together, alone = torch.vmap(op("act"))(many), op("act")(many[1])
        assert torch.allclose(together[1], alone, atol=1e-12)

    @pytest.mark.parametrize(
        ("name", "reason"),
        [("send", "its peers are unknown"), ("view", "may be a view"), ("log", "what it does is not declared")],
    )
    def test_what_is_no_function_says_why(self, name: str, reason: str) -> None:
        assert reason in lookup(getattr(OPS, name).default).reason

    def test_without_a_fake_kernel_there_is_no_shape(self) -> None:
        with pytest.raises(UnsupportedOp, match="give it a fake kernel"):
            op("shapeless")(X)

    def test_what_nobody_defines_is_named(self) -> None:
        with pytest.raises(UnsupportedOp, match="no library that is imported defines it"):
            resolve("tcverify_library::missing")


def halves(name: str, dim: int, *operands: tuple[torch.Tensor, int | None]) -> torch.Tensor:
    """The op on both halves of operands, each cut along its dim, one behind the other."""
    parts = [
        op(name)(*(x if d is None else x.chunk(2, d)[half] for x, d in operands)) for half in range(2)
    ]  # fmt: skip
    return torch.cat(parts, dim)


class TestLaws:
    def test_slices_are_computed_by_themselves(self) -> None:
        with supposing(read_op_laws(["tcverify_library::rope=rowwise(x=1, cos=0, sin=0)"])):
            whole = op("rope")(X, COS, SIN)
            assert torch.allclose(halves("rope", 1, (X, 1), (COS, 0), (SIN, 0)), whole)
            assert not torch.allclose(halves("rope", 0, (X, 0), (COS, None), (SIN, None)), whole)
        with supposing(read_op_laws(["tcverify_library::rope=rowwise(0)"])):
            whole = op("rope")(X, COS, SIN)
            assert torch.allclose(halves("rope", 0, (X, 0), (COS, None), (SIN, None)), whole)

    def test_elements_are_computed_by_themselves(self) -> None:
        with supposing(read_op_laws(["tcverify_library::rope=pointwise"])):
            whole = op("rope")(X, COS, SIN)
            assert torch.allclose(op("rope")(X.reshape(4, 4, 4), COS[:4], SIN[:4])[0], whole[0, :4])
            assert torch.allclose(op("rope")(X[0, 0, :1], COS[0, :1], SIN[0, :1]), whole[0, 0, :1])

    def test_sums_go_through_what_is_linear(self) -> None:
        assert not torch.allclose(op("act")(X + X.flip(0)), op("act")(X) + op("act")(X.flip(0)))
        with supposing(read_op_laws(["tcverify_library::act=linear(x)"])):
            assert torch.allclose(op("act")(X + 3 * X.flip(0)), op("act")(X) + 3 * op("act")(X.flip(0)))
            assert op("act")(X).std() > 0.1

    def test_they_are_read_and_told_alike(self) -> None:
        (law,) = read_op_laws(["my::op=rowwise(1)", "my::op=linear", "my::op.default = rowwise(x=0,y=-1)"]).values()
        assert law == OpLaw(rows=((("", 1),), (("x", 0), ("y", -1))), linear="")
        assert read_op_laws([f"my::op={text}" for text in law.texts]) == {"my::op": law}

    @pytest.mark.parametrize(
        "text", ["rope=linear", "my::op", "my::op=rowwise", "my::op=linear(x, y)", "my::op=even(0)"]
    )
    def test_what_is_no_law_is_refused(self, text: str) -> None:
        with pytest.raises(UsageError, match="is not a law of an op"):
            read_op_laws([text])


# ---------------------------------------------------------------------------------------------------- verification


def summed_then_rope(world_size: int = 2) -> Program:
    """An all_reduce, the op on its result, and a residual."""

    def build(b: GraphBuilder) -> Any:
        x, cos, sin = (b.input(name) for name in ("x", "cos", "sin"))
        total = b.call("_c10d_functional::wait_tensor", b.call("_c10d_functional::all_reduce", x, "sum", "tp"))
        return b.call("aten::add.Tensor", b.call("tcverify_library::rope", total, cos, sin), x)

    specs = [InputSpec("x", (8, 4), placements=(("tp", VARYING),)), InputSpec("cos", (8, 4)), InputSpec("sin", (8, 4))]
    return spmd_program(Mesh.grid({"tp": world_size}), specs, build)


def found(gm: fx.GraphModule, name: str) -> fx.Node:
    return next(node for node in gm.graph.nodes if name in node.name and node.op == "call_function")


def call(gm: fx.GraphModule, target: Any, *args: Any) -> fx.Node:
    made = gm.graph.call_function(target, args)
    made.meta["val"] = target(*fx.node.map_arg(args, lambda node: node.meta["val"]))
    return made


def cut(gm: fx.GraphModule, order: tuple[int, int]) -> None:
    """The op on both halves of the rows, joined again."""
    rope = found(gm, "rope")
    with gm.graph.inserting_before(rope):
        parts = [
            call(gm, OPS.rope.default, *(call(gm, torch.ops.aten.slice.Tensor, x, 0, s, s + 4) for x in rope.args))
            for s in (0, 4)
        ]
        joined = call(gm, torch.ops.aten.cat.default, [parts[i] for i in order], 0)
    rope.replace_all_uses_with(joined)
    gm.graph.erase_node(rope)


def by_halves(gm: fx.GraphModule) -> None:
    cut(gm, (0, 1))


def by_halves_turned_round(gm: fx.GraphModule) -> None:
    cut(gm, (1, 0))


def twice(gm: fx.GraphModule) -> None:
    """The op once more for a second reader: sound, with the same operands."""
    rope = found(gm, "rope")
    add = found(gm, "add")
    with gm.graph.inserting_before(add):
        again = call(gm, OPS.rope.default, *rope.args)
        two = call(gm, torch.ops.aten.add.Tensor, rope, again)
        half = call(gm, torch.ops.aten.mul.Tensor, two, 0.5)
    add.replace_input_with(rope, half)


def swapped(gm: fx.GraphModule) -> None:
    rope = found(gm, "rope")
    rope.args = (rope.args[0], rope.args[2], rope.args[1])


def summed_twice(gm: fx.GraphModule) -> None:
    rope = found(gm, "rope")
    with gm.graph.inserting_before(rope):
        rope.replace_input_with(rope.args[0], call(gm, torch.ops.aten.add.Tensor, rope.args[0], rope.args[0]))  # type: ignore[arg-type]


def dropped(gm: fx.GraphModule) -> None:
    rope = found(gm, "rope")
    rope.replace_all_uses_with(rope.args[0])  # type: ignore[arg-type]
    gm.graph.erase_node(rope)


def judged(pass_: Rewrite, program: Program | None = None, **options: Any) -> tuple[str, list[str]]:
    verdict = verify(pass_, program or summed_then_rope(), checks=["equivalence"], **options)
    return verdict.status, [f.kind for f in verdict.findings] + [d.reason for d in verdict.doubts]


class TestVerdicts:
    @pytest.mark.parametrize("domain", ["float64", "exact", "native"])
    def test_calls_with_the_same_operands_are_the_same(self, domain: str) -> None:
        assert judged(twice, domain=domain) == ("passed", [])

    @pytest.mark.parametrize("domain", ["float64", "exact"])
    @pytest.mark.parametrize("pass_", [swapped, summed_twice])
    def test_other_operands_of_the_same_shapes_are_a_defect(self, pass_: Rewrite, domain: str) -> None:
        assert judged(pass_, domain=domain) == ("refuted", ["wrong-value"])

    def test_many_ranks_run_it_at_once(self) -> None:
        program = summed_then_rope(16)
        assert judged(twice, program) == ("passed", [])
        assert judged(swapped, program) == ("refuted", ["wrong-value"])

    def test_a_shard_for_the_whole_asks_for_a_law_which_can_be_declared(self) -> None:
        verdict = verify(by_halves, summed_then_rope(), checks=["equivalence"])
        assert [doubt.reason for doubt in verdict.doubts] == ["law-needed"]
        assert "--op-law 'tcverify_library::rope=rowwise(0)'" in verdict.doubts[0].detail
        assert not verdict.findings
        with supposing(read_op_laws(["tcverify_library::rope=rowwise(0)"])):
            assert judged(by_halves, domain="exact") == ("passed", [])
            assert judged(by_halves_turned_round, domain="exact") == ("refuted", ["wrong-value"])

    def test_where_no_law_explains_it_or_the_op_is_gone_it_is_said(self) -> None:
        assert judged(by_halves_turned_round) == ("inconclusive", ["law-needed"])
        verdict = verify(dropped, summed_then_rope(), checks=["equivalence"])
        assert "no longer calls tcverify_library::rope x [8, 4]" in verdict.doubts[0].detail

    def test_what_is_wrong_beside_the_op_is_a_defect_all_the_same(self) -> None:
        def build(b: GraphBuilder) -> Any:
            x, cos, sin = (b.input(name) for name in ("x", "cos", "sin"))
            rope = b.call("tcverify_library::rope", x, cos, sin)
            return b.call("aten::add.Tensor", rope, x), b.call("aten::mul.Tensor", x, cos)

        program = spmd_program(TP, [InputSpec(name, (8, 4)) for name in ("x", "cos", "sin")], build)

        def both(gm: fx.GraphModule) -> None:
            dropped(gm)
            mul = found(gm, "mul")
            mul.args = (mul.args[0], mul.args[0])

        assert judged(dropped, program) == ("inconclusive", ["law-needed"])
        assert judged(both, program) == ("refuted", ["wrong-value"])

    def test_a_second_application_asks_for_the_law_too(self) -> None:
        verdict = verify(by_halves, summed_then_rope(), checks=["purity", "equivalence"], deep=True)
        assert "law-needed" in [doubt.reason for doubt in verdict.doubts]

    def test_real_groups_compute_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(extensions, "_LOADED", [])
        load_extension(str(Path(library_ops.__file__)))
        with ProcessGroupPool(2) as gloo:
            verdict = verify(twice, summed_then_rope(), confirm=gloo)
            assert (verdict.status, verdict.executors) == ("passed", ["lockstep", "gloo"])

    def test_programs_are_written_and_read(self) -> None:
        program = summed_then_rope()
        assert dumps(loads(dumps(program))) == dumps(program)


class TestCollectives:
    """What names a group is a function of what all members have."""

    @staticmethod
    def program(name: str) -> Program:
        def build(b: GraphBuilder) -> Any:
            x = b.input("x")
            given = ("tp",) if name == "reduce" else (b.rank, b.group("tp"))
            return b.call(f"tcverify_library::{name}", x, *given)

        mesh = Mesh.grid({"dp": 2, "tp": 2})
        return spmd_program(mesh, [InputSpec("x", (4, 2), placements=(("dp", VARYING), ("tp", VARYING)))], build)

    @pytest.mark.parametrize("name", ["reduce", "exchange"])
    def test_they_meet_and_depend_on_all_members(self, name: str) -> None:
        assert lookup(getattr(OPS, name).default).collective
        run = Lockstep().run(self.program(name))
        outputs = [rank.outputs[0] for rank in run.ranks]
        assert [len(rank.calls) for rank in run.ranks] == [1] * 4
        assert all(not torch.allclose(outputs[0], other) for other in outputs[1:])

    def test_the_operands_of_all_members_count_and_the_place_among_them(self) -> None:
        def result(me: int, other: torch.Tensor) -> torch.Tensor:
            steps = op("reduce")(me, X[0], Group("tp", (0, 1)))
            asked = next(steps)
            assert asked.tensor.shape == (1, 32)
            with pytest.raises(StopIteration) as stop:
                steps.send(torch.cat([asked.tensor, other.reshape(1, -1)]))
            value: torch.Tensor = stop.value.value
            return value

        first = result(0, X[1])
        assert first.shape == X[0].shape
        assert torch.equal(first, result(0, X[1]))
        assert not torch.allclose(first, result(0, X[1] + 1e-3))
        assert not torch.allclose(first, result(1, X[1]))

    def test_another_group_is_a_defect_and_none_is_refused(self) -> None:
        def other(gm: fx.GraphModule) -> None:
            call_ = found(gm, "reduce")
            call_.args = (call_.args[0], "dp")

        def nobody(gm: fx.GraphModule) -> None:
            call_ = found(gm, "reduce")
            call_.args = (call_.args[0], "pp")

        assert judged(other, self.program("reduce")) == ("refuted", ["wrong-value"])
        assert judged(nobody, self.program("reduce")) == ("refuted", ["rewritten-raises"])
        assert judged(lambda gm: None, self.program("reduce")) == ("passed", [])


class TestOpsThatWriteBehindAWrapper:
    """What AOTAutograd makes of a custom op that writes: copies are written, and returned."""

    @staticmethod
    def program(wrapper: str) -> Program:
        higher = getattr(torch.ops.higher_order, wrapper)
        graph = fx.Graph()
        kv, cache, slots = map(graph.placeholder, ("kv", "cache", "slots"))
        given: dict[str, Any] = {"kv": kv, "slots": slots}
        given |= (
            {"cache": cache}
            if wrapper == "auto_functionalized"
            else {"_cache_base_index": 0, "_cache_alias": True, "_all_bases": [cache]}
        )
        call_ = graph.call_function(higher, (OPS.store.default,), given)
        new = graph.call_function(operator.getitem, (call_, 1))
        graph.output((new, graph.call_function(torch.ops.aten.add.Tensor, (cache, new))))
        examples = [torch.ones(4, 2), torch.ones(8, 2), torch.arange(4)]
        captured = plain(fx.GraphModule({}, graph), examples)
        return program_of([captured] * 2, TP)

    @pytest.mark.parametrize("domain", ["float64", "exact", "native"])
    @pytest.mark.parametrize("wrapper", ["auto_functionalized", "auto_functionalized_v2"])
    def test_it_returns_what_it_would_have_written(self, wrapper: str, domain: str) -> None:
        program = self.program(wrapper)
        assert dumps(loads(dumps(program))) == dumps(program)
        run = Lockstep().run(program)
        new, total = run.ranks[0].outputs
        cache = run.ranks[0].inputs[1]
        assert torch.equal(cache + new, total)
        assert not torch.allclose(new, cache)
        assert judged(lambda gm: None, program, domain=domain) == ("passed", [])

        def other_cache(gm: fx.GraphModule) -> None:
            add = found(gm, "add")
            add.args = (add.args[1], add.args[1])

        assert judged(other_cache, program, domain=domain) == ("refuted", ["wrong-value"])
