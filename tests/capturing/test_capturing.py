"""Captured graphs in plain form, and the programs that are made of them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tcverify import VARYING, Lockstep, Mesh, dumps, loads, shard, verify
from tcverify.capturing import Captured, GroupFacts, InputFacts, RankRule, capture, for_all_ranks, plain, program_of
from tcverify.errors import ProgramError
from tcverify.ops import qualified_name
from tcverify.passes.identity import Identity

OPS = torch.ops._c10d_functional


def summed(x: torch.Tensor, group: str = "7") -> torch.Tensor:
    return OPS.wait_tensor(OPS.all_reduce(x, "sum", group))


def plainly_summed(x: torch.Tensor) -> torch.Tensor:
    return summed(x)


def traced(function: Callable[..., Any], *inputs: torch.Tensor, mode: str = "fake") -> fx.GraphModule:
    return make_fx(function, tracing_mode=mode, _allow_non_fake_inputs=True)(*inputs)


def on_two_ranks(module: fx.GraphModule, **more: Any) -> Captured:
    return plain(module, groups={"7": GroupFacts("tp", (0, 1))}, **more)


def names(graph: fx.Graph, op: str) -> list[str]:
    return [node.name for node in graph.nodes if node.op == op]


def targets(graph: fx.Graph) -> list[str]:
    return [qualified_name(node.target) for node in graph.nodes if node.op == "call_function"]


TP = Mesh.grid({"tp": 2})


class TestPlain:
    def test_parameters_and_constants_become_inputs(self) -> None:
        weight = nn.Parameter(torch.ones(3, 4))
        table = torch.tensor([2, 0, 1])

        captured = plain(traced(lambda x: (x @ weight)[:, table], torch.ones(2, 3)))

        assert {(i.role, i.spec.shape, i.recipe.kind) for i in captured.inputs} == {
            ("input", (2, 3), "uniform"),
            ("parameter", (3, 4), "uniform"),
            ("constant", (3,), "given"),
        }
        assert not names(captured.graph, "get_attr")
        given = next(i for i in captured.inputs if i.role == "constant")
        assert given.recipe.values == (2, 0, 1)

    def test_the_module_stays_as_it_is(self) -> None:
        weight = nn.Parameter(torch.ones(3))
        module = traced(lambda x: summed(x * weight), torch.ones(2, 3))
        before = str(module.graph)

        on_two_ranks(module)

        assert str(module.graph) == before

    def test_an_attribute_that_is_read_twice_is_one_input(self) -> None:
        weight = nn.Parameter(torch.ones(3))

        class Twice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = weight

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * self.weight + self.weight

        module = fx.symbolic_trace(Twice())
        captured = plain(module, [torch.ones(2, 3)])

        assert [i.name for i in captured.inputs] == ["x", "weight"]

    def test_symbolic_sizes_become_the_numbers_of_the_example(self) -> None:
        env = ShapeEnv()
        with FakeTensorMode(shape_env=env, allow_non_fake_inputs=True) as mode:
            x = mode.from_tensor(torch.ones(6, 4))
        module = make_fx(lambda x: summed(x.view(x.shape[0] * 2, -1)).sum(0), tracing_mode="symbolic")(torch.ones(6, 4))
        guards = len(env.guards)

        captured = on_two_ranks(module)

        assert captured.inputs[0].spec.shape == (6, 4)
        view = next(n for n in captured.graph.nodes if "view" in n.name)
        assert view.args[1] == [12, -1] or view.args[1] == [12, 2]
        assert all("sym_size" not in t for t in targets(captured.graph))
        assert len(env.guards) == guards
        assert x.shape[0] == 6

    def test_a_graph_of_torch_functions_is_traced_down_to_aten(self) -> None:
        captured = plain(fx.symbolic_trace(nn.Sequential(nn.Linear(4, 3), nn.ReLU())), [torch.ones(2, 4)])

        assert all(t.startswith("aten::") for t in targets(captured.graph))
        assert captured.notes == ("the graph calls torch functions and modules: it was traced down to aten",)

    def test_assertions_and_inputs_that_are_no_tensors_go(self) -> None:
        graph = fx.Graph()
        x, mesh, scale = graph.placeholder("x"), graph.placeholder("mesh"), graph.placeholder("scale")
        x.meta["val"], mesh.meta["val"], scale.meta["val"] = torch.ones(3, device="meta"), object(), 2.0
        graph.call_function(torch.ops.aten._assert_scalar.default, (True, "never"))
        graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (x, scale)), mesh))

        captured = plain(fx.GraphModule({}, graph))

        assert names(captured.graph, "placeholder") == ["x"]
        assert targets(captured.graph) == ["aten::mul.Tensor"]
        assert next(n for n in captured.graph.nodes if n.op == "call_function").args[1] == 2.0
        assert next(n for n in captured.graph.nodes if n.op == "output").args[0][1] is None

    def test_devices_become_the_cpu(self) -> None:
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = torch.ones(3, device="meta")
        made = graph.call_function(torch.ops.aten._to_copy.default, (x,), {"device": torch.device("cuda", 3)})
        graph.output(made)

        captured = plain(fx.GraphModule({}, graph))

        assert next(n for n in captured.graph.nodes if n.op == "call_function").kwargs["device"] == torch.device("cpu")

    def test_shapes_that_metadata_lacks_are_inferred(self) -> None:
        graph = fx.Graph()
        x = graph.placeholder("x")
        graph.output(graph.call_function(torch.ops.aten.t.default, (x,)))

        captured = plain(fx.GraphModule({}, graph), [torch.ones(2, 5)])

        assert next(n for n in captured.graph.nodes if n.name == "t_default").meta["val"].shape == (5, 2)

    def test_an_input_without_a_shape_is_refused(self) -> None:
        graph = fx.Graph()
        graph.output(graph.call_function(torch.ops.aten.t.default, (graph.placeholder("x"),)))

        with pytest.raises(ProgramError, match="the shape of input 'x' is unknown") as caught:
            plain(fx.GraphModule({}, graph))
        assert "example inputs" in str(caught.value.hint)

    def test_too_few_examples_are_refused(self) -> None:
        with pytest.raises(ProgramError, match="takes 2 inputs, but 1 examples"):
            plain(traced(lambda x, y: x + y, torch.ones(2), torch.ones(2)), [torch.ones(2)])

    @pytest.mark.parametrize(
        ("function", "inputs", "bound"),
        [
            (
                lambda w, i: torch.nn.functional.embedding(i, w),
                (torch.ones(9, 2), torch.zeros(3, dtype=torch.int64)),
                9,
            ),
            (lambda w, i: w.index_select(1, i), (torch.ones(2, 5), torch.zeros(3, dtype=torch.int64)), 5),
            (lambda w, i: w[i.view(-1)], (torch.ones(7, 2), torch.zeros(3, 1, dtype=torch.int64)), 7),
        ],
        ids=["embedding", "index_select", "index-of-a-view"],
    )
    def test_integers_are_drawn_in_the_range_of_what_they_index(
        self, function: Callable[..., Any], inputs: tuple[torch.Tensor, ...], bound: int
    ) -> None:
        captured = plain(traced(function, *inputs))

        indices = next(i for i in captured.inputs if i.spec.dtype == torch.int64)
        assert (indices.recipe.kind, indices.recipe.scale) == ("integers", float(bound))

    def test_elements_by_index_compute_and_masks_are_named(self) -> None:
        order = torch.tensor([2, 0, 1])
        captured = on_two_ranks(traced(lambda x: summed(x[:, order]), torch.ones(2, 3)))
        assert verify(Identity, program_of([captured] * 2)).status == "passed"

        graph = fx.Graph()
        x, mask = graph.placeholder("x"), graph.placeholder("mask")
        graph.output(graph.call_function(torch.ops.aten.index.Tensor, (x, [mask])))
        masked = plain(fx.GraphModule({}, graph), [torch.ones(3), torch.ones(3, dtype=torch.bool)])
        verdict = verify(Identity, program_of([masked] * 2, TP))
        assert [doubt.reason for doubt in verdict.doubts] == ["unsupported-op"]
        assert "an index is a mask" in verdict.doubts[0].detail

    def test_gains_of_norms_are_drawn_near_one(self) -> None:
        gain = nn.Parameter(torch.ones(4))
        captured = plain(traced(lambda x: torch.nn.functional.rms_norm(x, (4,), gain), torch.ones(2, 4)))

        assert next(i for i in captured.inputs if i.role == "parameter").recipe.kind == "norm_weight"


class TestPrograms:
    def test_ranks_that_run_one_graph_share_it_and_groups_become_mesh_dims(self) -> None:
        module = traced(plainly_summed, torch.ones(3))
        other = traced(lambda x: summed(x, "9"), torch.ones(3))
        captures = [
            *[plain(module, groups={"7": GroupFacts("tp", (0, 1))})] * 2,
            *[plain(other, groups={"9": GroupFacts("tp", (2, 3))})] * 2,
        ]

        program = program_of(captures)

        assert str(program.mesh) == "4 ranks; tp: [0, 1] [2, 3]"
        assert len(program.graphs) == 1
        assert dumps(loads(dumps(program))) == dumps(program)
        assert verify(Identity, program).status == "passed"

    def test_groups_without_a_label_are_put_together_by_order_of_use(self) -> None:
        def two(first: str, second: str) -> fx.GraphModule:
            return traced(lambda x: summed(summed(x, first), second), torch.ones(3))

        rows, columns = {0: ("1", (0, 1)), 2: ("2", (2, 3))}, {0: ("3", (0, 2)), 1: ("4", (1, 3))}
        captures = []
        for rank in range(4):
            row, column = rows[rank // 2 * 2], columns[rank % 2]
            facts = {row[0]: GroupFacts(None, row[1]), column[0]: GroupFacts(None, column[1])}
            captures.append(plain(two(row[0], column[0]), groups=facts))

        program = program_of(captures)

        assert str(program.mesh) == "4 ranks; group0: [0, 1] [2, 3]; group1: [0, 2] [1, 3]"
        assert len(program.graphs) == 1

    def test_ranks_outside_of_a_group_are_alone(self) -> None:
        captures = [
            plain(traced(plainly_summed, torch.ones(3)), groups={"7": GroupFacts("tp", (0, 2))}),
            plain(traced(lambda x: x * 2, torch.ones(3))),
            plain(traced(plainly_summed, torch.ones(3)), groups={"7": GroupFacts("tp", (0, 2))}),
        ]

        program = program_of(captures)

        assert str(program.mesh) == "3 ranks; tp: [0, 2] [1]"
        assert len(program.graphs) == 2
        assert Lockstep().run(program).finished

    def test_a_group_that_nobody_knows_is_named(self) -> None:
        with pytest.raises(ProgramError, match="group '7' in the graph of rank 0 has no known ranks"):
            program_of([plain(traced(plainly_summed, torch.ones(3)))] * 2)

    def test_a_group_without_its_rank_is_refused(self) -> None:
        captured = plain(traced(plainly_summed, torch.ones(3)), groups={"7": GroupFacts("tp", (0, 1))})
        with pytest.raises(ProgramError, match=r"group '7' is \[0, 1\], but it is used by rank 2 of 3"):
            program_of([captured] * 3)

    def test_sharded_inputs_are_parts_of_one_tensor(self) -> None:
        placed = {"x_1": InputFacts("input", (("7", shard(0)),), (6, 2))}
        captured = on_two_ranks(traced(plainly_summed, torch.ones(3, 2)), facts=placed)

        program = program_of([captured] * 2)

        (spec,) = program.inputs
        assert (spec.shape, spec.placements) == ((6, 2), (("tp", shard(0)),))
        assert not torch.equal(program.values(0)[0], program.values(1)[0])

    def test_the_user_says_how_an_input_is_placed(self) -> None:
        captured = on_two_ranks(traced(plainly_summed, torch.ones(3, 2)))

        program = program_of([captured] * 2, placements={"x_1": {"tp": VARYING}})

        assert program.inputs[0].placements == (("tp", VARYING),)
        with pytest.raises(ProgramError, match="no input 'y' to place"):
            program_of([captured] * 2, placements={"y": {"tp": VARYING}})
        with pytest.raises(ProgramError, match="no dim 'pp'"):
            program_of([captured] * 2, placements={"x_1": {"pp": VARYING}})

    def test_uneven_shards_fit_and_other_shapes_become_inputs_of_their_own(self) -> None:
        def gathered(rows: int) -> Captured:
            return on_two_ranks(traced(lambda x: summed(x.sum(0)), torch.ones(rows, 2)))

        sharded = program_of([gathered(3), gathered(2)], placements={"x_1": {"tp": shard(0)}})
        apart = program_of([gathered(5), gathered(2)])

        assert [s.shape for s in sharded.inputs] == [(5, 2)]
        assert [(s.name, s.shape) for s in apart.inputs] == [("x_1", (5, 2)), ("x_1_1", (2, 2))]
        assert Lockstep().run(apart).finished
        with pytest.raises(ProgramError, match="not parts of one tensor"):
            program_of([gathered(2), gathered(3)], placements={"x_1": {"tp": shard(0)}})

    def test_constants_that_differ_between_ranks_keep_their_values(self) -> None:
        def offset(rank: int) -> Captured:
            table = torch.tensor([rank * 10, rank * 10 + 1])
            return on_two_ranks(traced(lambda x: summed(x + table), torch.ones(2)))

        program = program_of([offset(0), offset(1)])

        tables = [next(v for v in program.values(rank) if v.dtype == torch.int64).tolist() for rank in range(2)]
        assert tables == [[0, 1], [10, 11]]

    def test_an_input_that_is_not_in_order_in_memory_computes_the_same(self) -> None:
        module = traced(lambda w, x: summed(x @ w.t()), torch.ones(4, 3).t(), torch.ones(2, 4))

        captured = on_two_ranks(module)

        assert captured.notes == ("treated as contiguous, although they were not: w_1",)
        assert verify(Identity, program_of([captured] * 2)).status == "passed"


class TestOneGraphForAll:
    def test_groups_follow_the_mesh(self) -> None:
        captured = plain(traced(plainly_summed, torch.ones(3)), groups={"7": GroupFacts("tp", (2, 3))})
        mesh = Mesh.grid({"dp": 2, "tp": 2})

        program = program_of(for_all_ranks(captured, mesh, rank=2), mesh)

        assert len(program.graphs) == 1
        assert [node.args[2] for node in program.graph(0).nodes if node.name == "all_reduce"] == ["tp"]

    def test_placements_follow_groups_that_the_graph_does_not_name(self) -> None:
        facts = {"x_1": InputFacts("input", (("3", shard(0)),), (6,))}
        groups = {"7": GroupFacts("tp", (0, 1)), "3": GroupFacts("dp", (0, 2))}
        captured = replace(on_two_ranks(traced(plainly_summed, torch.ones(3)), facts=facts), groups=groups)
        mesh = Mesh.grid({"dp": 2, "tp": 2})

        (spec,) = program_of(for_all_ranks(captured, mesh), mesh).inputs

        assert (spec.shape, spec.placements) == ((6,), (("dp", shard(0)),))

    def test_rank_arguments_of_tensor_cast_follow_the_rank(self) -> None:
        from tcverify.ops import define_ops

        define_ops()
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = torch.ones(4, device="meta")
        graph.output(graph.call_function(torch.ops.tensor_cast.reduce_scatter.default, (x, 0, 1, [0, 1])))

        program = program_of(for_all_ranks(plain(fx.GraphModule({}, graph)), TP, rank=1), TP)

        assert [n.args[2] for r in range(2) for n in program.graph(r).nodes if n.op == "call_function"] == [0, 1]
        assert Lockstep().run(program).finished

    def test_a_rule_says_how_an_integer_depends_on_the_rank(self) -> None:
        module = traced(lambda x: summed(x[2:4]), torch.ones(8))
        captured = on_two_ranks(module)
        rules = [RankRule.parse("slice_1.2=2*tp"), RankRule.parse("slice_1.3 = 2*rank+2")]

        program = program_of(for_all_ranks(captured, TP, rank=1, rules=rules), TP)

        bounds = [n.args[2:4] for rank in range(2) for n in program.graph(rank).nodes if n.name == "slice_1"]
        assert bounds == [(0, 2), (2, 4)]

    @pytest.mark.parametrize(
        ("rule", "message"),
        [
            ("slice_1.2=3*tp", "is 2 on rank 1, but its rule gives 3"),
            ("slice_1.7=tp", "is not an integer"),
            ("nothing.0=tp", "is not an integer"),
            ("slice_1.2=pp", "no dim 'pp'"),
        ],
    )
    def test_a_rule_that_does_not_fit_is_refused(self, rule: str, message: str) -> None:
        captured = on_two_ranks(traced(lambda x: summed(x[2:4]), torch.ones(8)))
        with pytest.raises(ProgramError, match=message):
            for_all_ranks(captured, TP, rank=1, rules=[RankRule.parse(rule)])

    @pytest.mark.parametrize("text", ["slice", "slice_1.2=2**tp", "slice_1.2=__import__('os')", "slice_1.2=tp*tp", ""])
    def test_what_is_no_rule_is_refused(self, text: str) -> None:
        with pytest.raises(ProgramError, match="not a rule"):
            RankRule.parse(text)

    def test_a_group_of_no_mesh_dim_is_refused(self) -> None:
        captured = plain(traced(plainly_summed, torch.ones(3)), groups={"7": GroupFacts(None, (0, 3))})
        with pytest.raises(ProgramError, match="which matches no mesh dim"):
            for_all_ranks(captured, Mesh.grid({"dp": 2, "tp": 2}))


class TestValues:
    def test_complex_tables_keep_their_values(self) -> None:
        table = torch.polar(torch.ones(3, 2), torch.arange(6.0).reshape(3, 2))

        def turned(x: torch.Tensor) -> torch.Tensor:
            return torch.view_as_real(torch.view_as_complex(x) * table)

        program = program_of(for_all_ranks(on_two_ranks(traced(turned, torch.ones(3, 2, 2))), TP))
        program = loads(dumps(program))

        values = dict(zip([i.name for i in program.inputs], program.values(1), strict=True))
        (held,) = [v for v in values.values() if v.is_complex()]
        torch.testing.assert_close(held.to(table.dtype), table)
        run = Lockstep().run(program)
        expected = turned(values["x_1"].float())
        torch.testing.assert_close(run.ranks[1].outputs[0].float(), expected)

    def test_complex_tables_may_differ_between_ranks(self) -> None:
        captures = []
        for rank in range(2):
            table = torch.full((2,), complex(rank, 1))
            captures.append(plain(traced(lambda x: x * table, torch.ones(2)), groups={"7": GroupFacts("tp", (0, 1))}))  # noqa: B023

        program = loads(dumps(program_of(captures, TP)))

        for rank in range(2):
            (held,) = [v for v in program.values(rank) if v.is_complex()]
            assert held.tolist() == [complex(rank, 1)] * 2


class TestTorchFunctions:
    def test_graphs_of_functions_of_torch_alone_are_traced_down(self) -> None:
        """torch.relu and operator.iadd are in the modules whose other functions compute on sizes."""
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["example_value"] = torch.empty(2, 2, device="meta")
        more = graph.call_function(operator.iadd, (x, 1))
        graph.call_function(operator.setitem, (x, 0, 5.0))
        graph.output((graph.call_function(torch.relu, (more,)), x))

        captured = plain(fx.GraphModule({}, graph))

        assert targets(captured.graph)[0] == "aten::add_.Tensor"
        assert all(t.startswith("aten::") for t in targets(captured.graph))
        program = program_of(for_all_ranks(captured, TP))
        given = program.values(0)[0]
        outputs = Lockstep().run(program).ranks[0].outputs
        expected = given.double() + 1
        expected[0] = 5
        torch.testing.assert_close(outputs[1].double(), expected)

    def test_functions_on_sizes_become_numbers(self) -> None:
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = torch.ones(3, device="meta")
        size = graph.placeholder("size")
        size.meta["val"] = 3
        twice = graph.call_function(operator.floordiv, (size, 2))
        twice.meta["val"] = 1
        graph.output(graph.call_function(torch.ops.aten.mul.Tensor, (x, twice)))

        captured = plain(fx.GraphModule({}, graph))

        assert captured.notes == ()
        assert targets(captured.graph) == ["aten::mul.Tensor"]

    def test_tracing_writes_into_no_buffer(self) -> None:
        norm = nn.BatchNorm1d(3)

        captured = plain(fx.symbolic_trace(nn.Sequential(norm)), [torch.ones(2, 3)])

        assert norm.num_batches_tracked.item() == 0
        (counter,) = [i for i in captured.inputs if i.spec.dtype == torch.int64]
        assert counter.recipe.values == (0,)


def test_a_module_in_two_places_is_captured_and_stays_as_it_is() -> None:
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, layer)
    before = dict(model.named_parameters())

    captured = capture(model, (torch.ones(2, 4),))

    assert {i.role for i in captured.inputs} == {"parameter", "input"}
    assert all(value is before[name] for name, value in model.named_parameters())
    assert model(torch.ones(2, 4)).shape == (2, 4)


def swapped_chunks(module: fx.GraphModule) -> fx.GraphModule:
    """What has been gathered stands in the other order."""
    (wait,) = module.graph.find_nodes(op="call_function", target=OPS.wait_tensor.default)
    with module.graph.inserting_after(wait):
        turned = module.graph.call_function(torch.ops.aten.roll.default, (wait, [4], [0]))
    turned.meta["val"] = wait.meta["val"].clone()
    wait.replace_all_uses_with(turned, delete_user_cb=lambda user: user is not turned)
    module.recompile()
    return module


def test_a_parameter_that_ranks_hold_parts_of_is_not_taken_as_equal() -> None:
    def captured(rank: int, whole: torch.Tensor) -> Captured:
        part = nn.Parameter(whole.chunk(2)[rank].clone())
        gather = OPS.all_gather_into_tensor.default
        module = traced(lambda x: x @ OPS.wait_tensor(gather(part, 2, "7")).t(), torch.ones(3, 6))
        return on_two_ranks(module)

    divided = program_of([captured(rank, torch.arange(48.0).reshape(8, 6)) for rank in range(2)], TP)
    (weight,) = [i for i in divided.inputs if i.shape == (4, 6)]
    assert weight.placements == (("tp", VARYING),)
    assert "wrong-value" in {f.kind for f in verify(swapped_chunks, divided).findings}
    assert verify(Identity(), divided).status == "passed"

    equal = program_of([captured(rank, torch.ones(8, 6)) for rank in range(2)], TP)
    assert [i.placements for i in equal.inputs] == [(), ()]
    assert "wrong-value" not in {f.kind for f in verify(swapped_chunks, equal).findings}


def test_parts_by_a_group_that_others_repeat_are_drawn_by_that_group() -> None:
    mesh = Mesh.grid({"dp": 2, "tp": 2})
    captures = []
    for rank in range(4):
        weight = nn.Parameter(torch.full((2, 2), float(rank % 2)))
        captures.append(plain(traced(lambda x: x @ weight, torch.ones(3, 2))))  # noqa: B023
    (weight_spec,) = [i for i in program_of(captures, mesh).inputs if i.shape == (2, 2)]
    assert weight_spec.placements == (("tp", VARYING),)
    (said,) = [i for i in program_of(captures, mesh, {weight_spec.name: {"tp": shard(0)}}).inputs if "x" not in i.name]
    assert said.placements == (("tp", shard(0)),)
