"""`tcverify check`: the user's own graphs, captured for real."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from tcverify import dumps
from tcverify.cli import main
from tests.cli.conftest import Outcome, only_case, pin, reduce_add_norm, run_apart, run_here, says

#: Graphs as a user has them, and a pass that is wrong about them.
GRAPHS = '''\
import os

import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

import tcverify

OPS = torch.ops._c10d_functional


def traced(function, *inputs):
    return make_fx(function, tracing_mode="fake")(*inputs)


def biased(x, bias, group="5"):
    return OPS.wait_tensor(OPS.all_reduce(x, "sum", group)) + bias


def one():
    return traced(lambda x, bias: biased(x, bias), torch.ones(2, 3), torch.ones(3))


def wide():
    return traced(lambda x, bias: biased(x, bias), torch.ones(64, 96), torch.ones(96))


def of_each_rank():
    return [traced(lambda x, bias: biased(x * (rank + 1), bias), torch.ones(2, 3), torch.ones(3)) for rank in range(2)]


def as_rank(rank, world_size):
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
    group = dist.new_group([0, 1]) if rank < 2 else dist.new_group([0, 1]) and dist.new_group([2, 3])
    if rank < 2:
        dist.new_group([2, 3])
    return traced(lambda x, bias: biased(x, bias, group.group_name), torch.ones(2, 3), torch.ones(3))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 8, bias=False)
        self.outer = torch.nn.Linear(8, 4, bias=False)
        self.bias = torch.nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return self.outer(torch.relu(self.inner(x))) + self.bias


def tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {"inner": ColwiseParallel(), "outer": RowwiseParallel()}
    return tcverify.capture(parallelize_module(Model(), mesh, plan), (torch.ones(3, 4),))


def training():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {"inner": ColwiseParallel(), "outer": RowwiseParallel()}
    return tcverify.capture(parallelize_module(Model(), mesh, plan), (torch.ones(3, 4),), training=True)


def dynamo(model=None):
    """What torch.compile gives a backend: torch functions and modules."""
    import torch.distributed._functional_collectives as collectives

    kept = []
    layer = torch.nn.Linear(4, 4)
    reduced = lambda x: collectives.all_reduce(layer(x), "sum", dist.group.WORLD) + x

    def backend(gm, example_inputs):
        kept.append((gm, example_inputs))
        return gm

    with torch.no_grad():
        torch.compile(model or reduced, backend=backend)(torch.ones(3, 4))
    return kept[0]


def dynamo_of_dtensors():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return dynamo(parallelize_module(torch.nn.Linear(4, 4), mesh, ColwiseParallel()))


def raises():
    raise KeyError("layers")


def wants(more):
    return more


def a_number():
    return 5


def dies():
    os.kill(os.getpid(), 9)


def sleeps():
    import time

    time.sleep(60)


@torch.library.custom_op("mine::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@scaled.register_fake
def _(x):
    return torch.empty_like(x)


def unknown_op():
    return traced(lambda x: torch.ops.mine.scaled(x), torch.ones(2))


def initialises():
    dist.init_process_group("gloo", rank=0, world_size=1)


def sinks(gm):
    """wait(all_reduce(x)) + y => wait(all_reduce(x + y)): y is added once per rank"""
    for add in list(gm.graph.nodes):
        if add.target is not torch.ops.aten.add.Tensor:
            continue
        for wait in add.all_input_nodes:
            if wait.target is OPS.wait_tensor.default:
                start = wait.args[0]
                add.replace_input_with(wait, start.args[0])
                with gm.graph.inserting_after(add):
                    total = gm.graph.call_function(start.target, (add, *start.args[1:]))
                with gm.graph.inserting_after(total):
                    waited = gm.graph.call_function(wait.target, (total,))
                add.replace_all_uses_with(waited, delete_user_cb=lambda user: user is not total)
                total.meta["val"] = torch.empty_like(add.meta["val"])
                waited.meta["val"] = total.meta["val"]
                gm.graph.erase_node(wait)
                gm.graph.erase_node(start)
                break
    gm.recompile()
    return gm


def widens(gm):
    """x + y => y + x, which changes nothing"""
    for add in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
        add.args = tuple(reversed(add.args))
    gm.recompile()
    return gm
'''


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with GRAPHS in graphs.py, an exported program and a program file."""
    directory = tmp_path_factory.mktemp("graphs")
    with pytest.MonkeyPatch.context() as patch:
        pin(patch, directory)
        Path("graphs.py").write_text(GRAPHS)
        Path("program.json").write_text(dumps(reduce_add_norm()))
        Path("broken.json").write_text("{")
        Path("broken.pt2").write_text("no archive")
        yield directory


def check(source: str, *options: str, pass_: str = "graphs.py:sinks") -> Outcome:
    return run_here("check", *source.split(), "--pass", pass_, "--draws", "1", "--confirm", "none", *options)


@pytest.mark.parametrize(
    ("source", "options", "mesh"),
    [
        pytest.param("graphs.py:one", ["--mesh", "tp=2"], "2 ranks; tp: [0, 1]", id="one-graph"),
        pytest.param(
            "graphs.py:one", ["--mesh", "dp=2,tp=2", "--group", "5=tp"], "tp: [0, 1] [2, 3]", id="group-of-a-mesh-dim"
        ),
        pytest.param("graphs.py:of_each_rank", ["--group", "5=0,1"], "2 ranks; group0: [0, 1]", id="a-list"),
        pytest.param("graphs.py:as_rank", ["--world-size", "4"], "4 ranks; group0: [0, 1] [2, 3]", id="every-rank"),
        pytest.param("graphs.py:tensor_parallel", ["--world-size", "2"], "shard(0) over tp: 1 input", id="dtensor"),
        pytest.param("graphs.py:dynamo", ["--world-size", "2"], "it was traced down to aten", id="dynamo"),
    ],
)
def test_a_defect_is_found_on_captured_graphs(graphs: Path, source: str, options: list[str], mesh: str) -> None:
    found = check(source, *options, "--report-dir", "found")

    assert found.code == 1, found.out + found.err
    assert mesh in " ".join(found.out.split())
    assert "wrong-value: an output differs" in found.out
    assert "first divergence: '" in found.out
    assert "tcverify replay" in found.out


def test_sizes_are_the_programs_own_or_small_as_wanted(graphs: Path) -> None:
    found = check("graphs.py:wide", "--mesh", "tp=2", "--sizes", "small", "--report-dir", "small", "--report", "html")

    assert found.code == 1, found.out + found.err
    assert "[64, 96] in your program" in found.out
    folder = Path("small") / only_case(Path("small"))
    assert json.loads((folder / "counterexample.json").read_text())["real_shapes"]["x_1"] == [64, 96]
    page = (folder / "report.html").read_text()
    assert "In your program" in page
    assert "[64, 96]" in page
    again = run_here("replay", str(folder), "--confirm", "none")
    assert "[64, 96] in your program" in again.out
    real = check("graphs.py:wide", "--mesh", "tp=2", "--sizes", "real", "--shrink-time", "0", "--report-dir", "real",
                 "--report", "sarif,github")  # fmt: skip
    assert "float32[64, 96]" in real.out
    assert "in your program" not in real.out
    (result,) = json.loads(Path("real", "tcverify.sarif").read_text())["runs"][0]["results"]
    assert result["ruleId"] == "wrong-value"
    assert "\n::error file=graphs.py,line=" in real.out


def test_a_sound_pass_passes_on_a_captured_model_on_gloo(graphs: Path) -> None:
    found = run_here("check", "graphs.py:tensor_parallel", "--pass", "graphs.py:widens", "--world-size", "2")

    assert found.code == 0, found.out + found.err
    assert "passed: 2 programs (2 passed, 0 refuted, 0 inconclusive)" in found.out
    assert "2 changed by the pass" in found.out


def test_what_shrinks_to_fewer_ranks_is_confirmed_on_as_many(graphs: Path) -> None:
    options = ["--pass", "graphs.py:sinks", "--world-size", "4", "--draws", "1", "--report-dir", "four"]
    found = run_here("check", "graphs.py:as_rank", *options)

    assert found.code == 1, found.out + found.err
    assert "program: 2 ranks; " in found.out
    assert "found by equivalence in lockstep and gloo" in found.out


def test_forward_and_backward_are_one_program(graphs: Path) -> None:
    found = check("graphs.py:training", "--world-size", "2", pass_="graphs.py:widens")

    assert found.code == 0, found.out + found.err
    assert "tangents_1" in found.out


def test_inputs_of_which_nothing_is_known_are_named(graphs: Path) -> None:
    found = check("graphs.py:one", "--mesh", "tp=2", pass_="graphs.py:widens")

    assert found.code == 0, found.out + found.err
    assert "placement unknown, treated as different on the ranks: bias_1" in " ".join(found.out.split())
    assert "according to the values or the graph: x_1 (" in " ".join(found.out.split())  # an all_reduce sums it
    placed = check("graphs.py:one", "--mesh", "tp=2", "--placement", "bias_1=tp:varying", pass_="graphs.py:widens")
    assert "placement unknown" not in placed.out
    assert "varying over tp: 2 inputs" in placed.out
    everything = check("graphs.py:one", "--mesh", "tp=2", "--placement", "*_1=tp:replicated", pass_="graphs.py:widens")
    assert "treated as different" not in everything.out


def test_a_pass_that_finds_nothing_to_do_has_tested_nothing(graphs: Path) -> None:
    found = check("program.json")

    assert found.code == 1
    assert "nothing tested" in found.out


def test_a_program_file_is_checked_and_saved(graphs: Path) -> None:
    found = check("program.json", "--save", "again.json", pass_="sequence_parallel")

    assert found.code == 0, found.out + found.err
    assert Path("again.json").read_text() == Path("program.json").read_text().replace('"seed":1', '"seed":0') + "\n"


def test_an_exported_program_is_checked(graphs: Path) -> None:
    script = (
        "import torch, torch.distributed as dist\n"
        "import torch.distributed._functional_collectives as fc\n"
        "from torch.testing._internal.distributed.fake_pg import FakeStore\n"
        "dist.init_process_group('fake', rank=0, world_size=2, store=FakeStore())\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.weight = torch.nn.Parameter(torch.ones(4, 4))\n"
        "        self.register_buffer('order', torch.tensor([2, 0, 1, 3]))\n"
        "    def forward(self, x):\n"
        "        return fc.all_reduce(x @ self.weight, 'sum', dist.group.WORLD)[:, self.order] + x\n"
        "torch.export.save(torch.export.export(Model(), (torch.ones(3, 4),)), 'model.pt2')\n"
    )
    assert run_apart("-W", "ignore", "-c", script, cwd=graphs).code == 0
    passed = check("model.pt2", "--world-size", "2", pass_="graphs.py:widens")
    several = check("model.pt2 model.pt2", "--group", "0=0,1", pass_="graphs.py:widens")

    assert passed.code == several.code == 0, passed.out + passed.err + several.err
    assert "2 ranks; world: [0, 1]; one graph" in passed.out


@pytest.mark.parametrize(
    ("source", "options", "texts"),
    [
        pytest.param("graphs.py:one", [], ["no number of ranks", "give --mesh (tp=2)"], id="no-ranks"),
        pytest.param("graphs.py:one", ["--mesh", "dp=2,tp=2"],
                     ["group '5' in the graph of rank 0 has no known ranks"], id="no-group"),
        pytest.param("graphs.py:one", ["--mesh", "tp=2", "--group", "5=pp"], ["the mesh has no dim 'pp'"], id="no-dim"),
        pytest.param("graphs.py:one", ["--mesh", "tp=2", "--group", "5=a-b"],
                     ["neither a mesh dim nor ranks"], id="group"),
        pytest.param("graphs.py:one", ["--world-size", "2,4"], ["names 2 sizes"], id="two-sizes"),
        pytest.param("graphs.py:one", ["--mesh", "tp=2", "--placement", "x_1=tp"],
                     ["names no mesh dim"], id="placement"),
        pytest.param("graphs.py:one", ["--mesh", "tp=2", "--placement", "x_1=tp:odd"],
                     ["'odd' is not a placement"], id="no-placement"),
        pytest.param("graphs.py:one", ["--mesh", "tp=2", "--placement", "z=tp:varying"],
                     ["no input 'z' to place", "x_1"], id="no-input"),
        pytest.param("graphs.py:one", ["--mesh", "tp=2", "--rank-constant", "add"],
                     ["not a rule for a rank constant"], id="rule"),
        pytest.param(
            "graphs.py:dynamo_of_dtensors", ["--world-size", "2"], ["is a DTensor", "tcverify.capture"], id="dtensors"
        ),
        pytest.param("graphs.py:raises", ["--world-size", "2"],
                     ["on rank 0: it raises KeyError: 'layers'", "graphs.py:"], id="raises"),
        pytest.param("graphs.py:wants", [],
                     ["the function requires 'more'", "without arguments, or with rank and world_size"], id="wants"),
        pytest.param("graphs.py:a_number", [], ["it returns a int", "return a GraphModule"], id="no-graph"),
        pytest.param("graphs.py:dies", [], ["crashed its process (exit code -9)"], id="dies"),
        pytest.param("graphs.py:sleeps", ["--capture-timeout", "2"],
                     ["did not return within 2 s", "--capture-timeout"], id="hangs"),
        pytest.param("graphs.py:unknown_op", ["--mesh", "tp=2"],
                     ["op mine::scaled", "--extension"], id="unknown-op"),
        pytest.param("graphs.py:initialises", ["--world-size", "2"],
                     ["initialises torch.distributed itself"], id="initialises"),
        pytest.param("graphs.py:one", ["--mesh", "dp=64,tp=32"],
                     ["2048 ranks are more than are run here", "at most 1024"], id="too-many-ranks"),
        pytest.param("graphs.py:one", ["--mesh", "tp=2", "--op-law", "rope=rowwise"],
                     ["'rope=rowwise' is not a law of an op", "OP=rowwise(DIM)"], id="no-law"),
        pytest.param("graphs.py:nothing", [], ["graphs.py has no 'nothing'"], id="no-function"),
        pytest.param("graphs.py", [], ["names no function", "graphs.py:graphs"], id="no-name"),
        pytest.param("missing.pt2", [], ["there is no file missing.pt2"], id="no-file"),
        pytest.param("broken.pt2", ["--world-size", "2"],
                     ["torch.export cannot load it", "torch.export.save"], id="broken-pt2"),
        pytest.param("broken.json", [], ["broken.json is not JSON"], id="broken-json"),
        pytest.param("model.onnx", [], ["names no function", ".pt2 or .json"], id="other-file"),
    ],
)  # fmt: skip
def test_what_gives_no_program_is_refused(graphs: Path, source: str, options: list[str], texts: list[str]) -> None:
    says(check(source, *options), 2, *texts)


def test_check_needs_a_pass(graphs: Path) -> None:
    result = CliRunner().invoke(main.main, ["check", "program.json"])

    assert result.exit_code == 2
    assert "--pass" in result.output
