"""Programs that are one edit away from a program."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx

from tcverify.campaign.search.calls import Calls, EditDoesNotFit, role_of
from tcverify.campaign.search.edits import FAMILIES, Site
from tcverify.campaign.search.synthesis import synthesise_calls
from tcverify.execution import Lockstep
from tcverify.ops import OPEN_END
from tcverify.program import PARTIAL, InputSpec, Mesh, Program, Recipe, dumps, spmd_program
from tcverify.shrink.graph.legalize import facts_of, legalize_edit
from tcverify.shrink.graph.sketch import program_of, sketch_of
from tcverify.shrink.graph.step_facts import Facts

OPS = ("aten::neg", "aten::add.Tensor", "tensor_cast::reduce_scatter", "tensor_cast::add_rms_norm2", "aten::view")


def reduce_norm(mesh: Mesh | None = None) -> Program:
    """all_reduce, and a norm with a residual, whose first result alone is returned."""
    mesh = mesh or Mesh.grid({"tp": 2})
    dim = mesh.dims[0].name
    inputs = [InputSpec("x", (2, 4), placements=((dim, PARTIAL),)), InputSpec("y", (2, 4)), InputSpec("w", (4,))]

    def build(b):
        x, y, w = b.input("x"), b.input("y"), b.input("w")
        reduced = b.call("tensor_cast::all_reduce", x, b.rank, b.group(dim))
        both = b.call("tensor_cast::add_rms_norm2", reduced, y, w, 1e-6)
        return b.call("python::getitem", both, 0)

    return spmd_program(mesh, inputs, build)


def calls() -> Calls:
    made = Calls(OPS)
    for name in OPS:
        made.guess(synthesise_calls(name))
    return made


def site_of(program: Program) -> Site:
    facts = facts_of(sketch_of(program))
    return Site(facts, calls().named(), integers=(0, 1, 3), floats=(0.25,), kernels=(facts,))


def made(site: Site, family: str) -> list[Program]:
    """The legal programs of a family of edits."""
    found = []
    for edit in FAMILIES[family](site):
        try:
            sketch = edit.make()
        except EditDoesNotFit:
            continue
        facts = legalize_edit(site.facts, sketch) if sketch is not None else None
        if isinstance(facts, Facts):
            found.append(program_of(facts.sketch))
    return found


def texts(programs: list[Program]) -> list[str]:
    return [str(program.graphs[0]) for program in programs]


def scattered(mesh: Mesh, shape: tuple[int, ...], dim: str) -> Program:
    """A reduce_scatter along the first dim, over a dim of the mesh."""
    inputs = [InputSpec("x", shape, placements=((dim, PARTIAL),))]

    def build(b):
        return b.call("tensor_cast::reduce_scatter", b.input("x"), 0, b.rank, b.group(dim))

    return spmd_program(mesh, inputs, build)


def test_what_has_no_result_is_not_returned() -> None:
    def build(b):
        x = b.input("x")
        b.call("p2p::barrier", "tp")
        return b.call("aten::neg", x)

    program = spmd_program(Mesh.grid({"tp": 2}), [InputSpec("x", (2,))], build)
    more = [one.graphs[0].output_node().args[0] for one in made(site_of(program), "return a value")]
    assert [[node.name for node in nodes] for nodes in more] == [["neg", "x"]]


def test_calls_seen_on_another_mesh_are_over_groups_as_large_and_fit_values_of_other_dims():
    """Seen in one dim over the first dim of a mesh, of which the program has the groups in its second dim."""
    seen = Calls(("tensor_cast::reduce_scatter",))
    seen.learn(facts_of(sketch_of(scattered(Mesh.grid({"dp": 2, "tp": 1}), (8,), "dp"))))
    facts = facts_of(sketch_of(reduce_norm(Mesh.grid({"one": 1, "tp": 2}))))
    programs = made(Site(facts, seen.named()), "make a value")
    scatters = [
        node for program in programs for node in program.graphs[0].nodes if "reduce_scatter" in str(node.target)
    ]
    shapes = {(tuple(node.args[0].meta["val"].shape), tuple(node.meta["val"].shape)) for node in scatters}
    assert ((4, 4), (2, 4)) in shapes  # in place of the residual
    assert all(before != after for before, after in shapes)


@pytest.fixture(scope="module")
def site() -> Site:
    return site_of(reduce_norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_makes_programs_that_run(site: Site, family: str):
    programs = made(site, family)
    assert programs or family in (
        "change a list",
        "change a text",
        "give a default another value",
        "write an argument otherwise",
        "return less",
        "change a group",
        "change values",
        "change an option",
        "let a rank differ",
    )
    ran = [Lockstep().run(program).finished for program in programs[::5]]
    assert sum(ran) >= 0.6 * len(ran)


@pytest.mark.parametrize("family", FAMILIES)
def test_edits_are_the_same_each_time(site: Site, family: str):
    again = site_of(reduce_norm())
    assert [dumps(one) for one in made(site, family)] == [dumps(one) for one in made(again, family)]


def test_a_tuple_is_returned_whole(site: Site):
    assert any("return (getitem, add_rms_norm2)" in text for text in texts(made(site, "return a value")))


def test_an_input_is_made_by_a_call_of_a_larger_one(site: Site):
    shapes = [
        {spec.shape for spec in program.inputs}
        for program in made(site, "make a value")
        if "reduce_scatter" in str(program.graphs[0])
    ]
    assert any((4, 4) in found for found in shapes)


def test_a_call_stands_between_a_value_and_its_reader(site: Site):
    assert any(
        "add_rms_norm2.default](args = (%view_1, %y" in text for text in texts(made(site, "put a call on an edge"))
    )


def test_an_operand_is_another_value_of_its_type(site: Site):
    assert any(
        "(args = (%all_reduce, %all_reduce, %w" in t.replace("](args", "](args").replace("default](", "(")
        for t in texts(made(site, "take another operand"))
    )


def test_operands_are_swapped(site: Site):
    assert any("(%y, %all_reduce, %w" in text for text in texts(made(site, "swap operands")))


def test_a_kernel_reads_what_another_makes(site: Site):
    """Its result is no longer returned: the other kernel's is."""
    joined = [p for p in made(site, "feed another kernel") if str(p.graphs[0]).count("all_reduce.default]") == 2]
    assert any("all_reduce.default](args = (%getitem" in text for text in texts(joined))
    assert all("return (getitem" in text or "return getitem" in text for text in texts(joined))


def test_a_kernel_stands_within_another(site: Site):
    inside = [text for text in texts(made(site, "put a kernel within")) if "all_reduce_1" in text]
    assert any("add_rms_norm2.default](args = (%getitem" in text for text in inside)


def test_sizes_of_a_kernel_follow_those_of_what_it_reads():
    mesh = Mesh.grid({"tp": 2})
    negated = spmd_program(mesh, [InputSpec("x", (6, 8))], lambda b: b.call("aten::neg", b.input("x")))
    site = Site(facts_of(sketch_of(negated)), (), kernels=(facts_of(sketch_of(reduce_norm())),))
    shapes = [{spec.shape for spec in program.inputs} for program in made(site, "feed another kernel")]
    assert {(6, 8), (8,)} in shapes


def test_another_result_is_selected(site: Site):
    assert any("%add_rms_norm2, 1)" in text for text in texts(made(site, "select another result")))


def test_one_input_broadcasts(site: Site):
    assert any(spec.name == "y" and spec.shape == (1, 4) for p in made(site, "change a shape") for spec in p.inputs)


def test_a_call_is_made_on_another_mesh():
    mesh = Mesh.grid({"dp": 2, "tp": 2})
    program = reduce_norm(mesh)
    found = [text for text in texts(made(site_of(program), "read a value")) if "reduce_scatter" in text]
    assert found
    ranks = next(p for p in made(site_of(program), "read a value") if "reduce_scatter" in str(p.graphs[0])).ranks
    assert [binding.constants for binding in ranks] != [ranks[0].constants] * 4


def test_roles_of_rank_constants():
    mesh = Mesh.grid({"dp": 2, "tp": 2})
    assert role_of([0, 1, 2, 3], mesh).kind == "rank"
    assert role_of([[0, 1], [0, 1], [2, 3], [2, 3]], mesh).on(Mesh.grid({"tp": 3})) == [[0, 1, 2]] * 3
    given = role_of([7, 7, 8, 8], mesh)
    assert (given.kind, given.on(mesh), given.on(Mesh.grid({"tp": 2}))) == ("given", [7, 7, 8, 8], None)


def test_ops_that_no_program_has_shown_are_called_as_their_signatures_say():
    (neg,) = synthesise_calls("aten::neg")
    assert neg.types == (((2, 4), neg.types[0][1]),)
    (mm,) = synthesise_calls("aten::mm")
    assert [shape for shape, _ in mm.types] == [(2, 4), (4, 4)]
    assert {pattern.args[1] for pattern in synthesise_calls("tensor_cast::reduce_scatter")} == {0, 1}
    assert [[shape for shape, _ in one.types] for one in synthesise_calls("aten::addmm")] == [[(4, 4)] * 3]
    assert [[shape for shape, _ in one.types] for one in synthesise_calls("aten::bmm")] == [[(2, 4, 4)] * 2]
    assert {one.args[1] for one in synthesise_calls("aten::to.dtype")} == {torch.bfloat16, torch.int64}
    assert [one.args[1] for one in synthesise_calls("aten::sum.dim_IntList")] == [[0]]
    assert synthesise_calls("nobody::knows") == []


def test_a_rank_alone_does_not_read_what_its_peers_read(site: Site):
    assert made(site, "let a rank differ") == []  # no program was drawn of which that is true
    told = replace(site, apart=True)
    programs = [program for program in made(told, "let a rank differ") if len(program.graphs) == 2]
    reduced = [sum(str(graph).count("all_reduce.default]") for graph in program.graphs) for program in programs]
    assert programs
    assert set(reduced) == {2}  # collectives stay on all ranks
    assert all(Lockstep().run(program).finished for program in programs)


def test_options_are_such_as_programs_have_had(site: Site):
    told = replace(site, options={"mode": ["fast", "safe"], "depth": [1]})
    assert [program.options for program in made(told, "change an option")] == [
        {"mode": "fast"},
        {"mode": "safe"},
        {"depth": 1},
    ]
    fast = replace(told, facts=facts_of(replace(told.facts.sketch, options={"mode": "fast"})))
    assert [program.options for program in made(fast, "change an option")] == [
        {"mode": "safe"},
        {},
        {"mode": "fast", "depth": 1},
    ]


def test_integers_are_such_as_floating_point_does_not_have():
    def build(b):
        return b.call("aten::neg", b.input("n"))

    program = spmd_program(
        Mesh.grid({"tp": 2}), [InputSpec("n", (4,), torch.int64, recipe=Recipe("integers", 2.0))], build
    )
    (wide,) = made(site_of(program), "change values")
    values = wide.inputs[0].values(wide.mesh, 0, wide.seed)
    assert (values.double().to(torch.int64) != values).all()
    floats = [one for one in made(site_of(program), "change a dtype") if one.inputs[0].dtype.is_floating_point]
    assert {one.inputs[0].recipe.kind for one in floats} == {"uniform"}


def test_one_place_reads_what_the_same_calls_make_of_other_inputs():
    def build(b):
        made = b.call("aten::neg", b.call("aten::exp", b.input("x")))
        return b.call("aten::add.Tensor", made, made)

    program = spmd_program(Mesh.grid({"tp": 2}), [InputSpec("x", (2, 4))], build)
    found = [one for one in made(site_of(program), "make a value again") if str(one.graphs[0]).count("aten.exp") == 2]
    assert all("neg_1)" in text or "(%neg_1, %neg)" in text for text in texts(found))
    assert {tuple(spec.shape for spec in one.inputs) for one in found} == {
        ((2, 4),),
        ((2, 4), (2, 4)),
        ((2, 4), (2, 2, 4)),
    }


def test_one_of_two_places_of_a_reader_reads_a_step_that_is_done_twice():
    def build(b):
        made = b.call("aten::neg", b.input("x"))
        return b.call("aten::add.Tensor", made, made)

    program = spmd_program(Mesh.grid({"tp": 2}), [InputSpec("x", (2, 4))], build)
    assert any("(%neg, %neg_1)" in text for text in texts(made(site_of(program), "repeat a step")))


def test_another_operand_broadcasts(site: Site):
    shapes = {tuple(spec.shape for spec in one.inputs)[1:] for one in made(site, "take another operand")}
    assert ((2, 4), (4,)) in shapes
    assert any((2, 2, 4) in found or (4, 4) in found for found in shapes)


def test_lists_of_integers_are_shorter_or_turned():
    program = spmd_program(
        Mesh.grid({"tp": 2}),
        [InputSpec("x", (2, 4, 4))],
        lambda b: b.call("aten::amax", b.input("x"), [0, 2]),
    )
    found = " ".join(texts(made(site_of(program), "change a list")))
    assert all(f"(%x, {dims})" in found for dims in ("[]", "[0]", "[2]", "[2, 0]"))


def test_a_dtype_is_another_one_wherever_it_stands():
    def build(b):
        x, y = b.input("x"), b.input("y")
        return b.call("aten::cat", [b.call("aten::_to_copy", x, dtype=torch.bfloat16), y])

    inputs = [InputSpec("x", (4,)), InputSpec("y", (4,), torch.bfloat16)]
    found = made(site_of(spmd_program(Mesh.grid({"tp": 2}), inputs, build)), "change a dtype")
    whole = [one for one in found if "dtype: torch.int64" in str(one.graphs[0])]
    assert any([spec.dtype for spec in one.inputs] == [torch.float32, torch.int64] for one in whole)


def test_dims_bounds_and_sizes_are_written_in_other_ways_that_mean_the_same():
    def build(b):
        part = b.call("aten::slice.Tensor", b.input("x"), 1, 2, 4)
        return b.call("aten::view", b.call("aten::sum.dim_IntList", part, [0, 1]), [4])

    program = spmd_program(Mesh.grid({"tp": 2}), [InputSpec("x", (3, 4, 4))], build)
    found = made(site_of(program), "write an argument otherwise")
    assert len(found) == 5
    shown = " ".join(texts(found))
    for call in ("(%x, -2, 2, 4)", "(%x, 1, -2, 4)", f"(%x, 1, 2, {OPEN_END})", "[-3, -2])", "[-1])"):
        assert call in shown
    results = [Lockstep().run(one).ranks[0].outputs[0] for one in (program, *found)]
    assert all(torch.equal(one, results[0]) for one in results)


def alone(build, *shapes: tuple[int, ...]) -> Site:
    """A program of calls on inputs x0, x1, …, on two ranks."""
    names = [f"x{number}" for number in range(len(shapes))]
    inputs = [InputSpec(name, shape) for name, shape in zip(names, shapes, strict=True)]
    return site_of(spmd_program(Mesh.grid({"tp": 2}), inputs, lambda b: build(b, *map(b.input, names))))


def steps_of(program: Program, op: str) -> list[fx.Node]:
    return [node for node in program.graphs[0].nodes if op in str(node.target)]


def test_a_reduction_is_another_one():
    def build(b, x):
        started = b.call("_c10d_functional::all_reduce", x, "sum", "tp")
        return b.call("_c10d_functional::wait_tensor", started)

    found = made(alone(build, (2, 4)), "change a text")
    assert {steps_of(program, "all_reduce")[0].args[1] for program in found} == {"max", "avg", "min", "product"}


def test_a_group_is_that_of_another_dim():
    def build(b):
        gathered = b.call("_c10d_functional::all_gather_into_tensor", b.input("x"), 2, "tp")
        return b.call("_c10d_functional::wait_tensor", gathered)

    mesh = Mesh.grid({"dp": 3, "tp": 2})
    (program,) = made(site_of(spmd_program(mesh, [InputSpec("x", (2, 4))], build)), "change a group")
    (gather,) = steps_of(program, "all_gather")
    assert gather.args[1:] == (3, "dp")
    assert Lockstep().run(program).ranks[0].outputs[0].shape == (6, 4)


def test_what_is_left_to_its_default_is_given():
    def build(b, x, y):
        added = b.call("aten::add.Tensor", x, y)
        return b.call("python::getitem", b.call("aten::split.Tensor", added, 2), 1)

    found = made(alone(build, (4, 4), (4, 4)), "give a default another value")
    assert {node.kwargs.get("alpha") for p in found for node in steps_of(p, "add")} >= {None, 2, -1}
    dims = {node.args[2:] for p in found for node in steps_of(p, "split")}
    assert {(), (1,), (-1,)} <= dims  # by position, as tracing writes them


def test_a_value_is_written_behind_what_reads_it():
    def build(b, x):
        made = b.call("aten::relu", x)
        first = b.call("aten::neg", made)
        return first, b.call("aten::add.Tensor", made, first)

    found = made(alone(build, (2, 4)), "write in place")
    ways = {str(node.target) for program in found for node in program.graphs[0].nodes}
    assert {"aten.add_.Tensor", "aten.mul.out", "aten.slice.Tensor"} <= ways
    between = []
    for program in found:
        names = [node.name for node in program.graphs[0].nodes]
        writes = [
            node for node in program.graphs[0].nodes if "out" in node.kwargs or str(node.target) == "aten.add_.Tensor"
        ]
        between += [node for node in writes if names.index("neg") < names.index(node.name) < names.index("add")]
    assert len(between) >= 3


def test_a_value_lies_otherwise_in_memory():
    found = made(alone(lambda b, x: b.call("aten::neg", b.call("aten::relu", x)), (2, 4)), "lay a value out otherwise")
    read = [steps_of(program, "neg")[0].args[0].meta["val"] for program in found]
    assert {tuple(spec.shape) for spec in read} == {(2, 4)}
    assert {tuple(spec.stride) for spec in read} == {(0, 1), (1, 2), (4, 1)}
    assert any(spec.offset == 8 for spec in read)
