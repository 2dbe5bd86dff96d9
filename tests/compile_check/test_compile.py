"""`checked` inside torch.compile: TorchDynamo, AOTAutograd and DTensor are real, the process group is torch's fake one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tcverify import REPLICATED, checked, checked_backend
from tcverify.errors import UsageError
from tcverify.verification.exceptions import WrongValue
from tests.support import checked_passes as passes

pytestmark = pytest.mark.filterwarnings("ignore")  # TorchDynamo and AOTAutograd warn of what is to come in torch


@pytest.fixture(scope="module")
def job() -> Iterator[DeviceMesh]:
    """A mesh of two ranks, of which this process is the first. One for all tests: DTensor keeps meshes for ever."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


@pytest.fixture
def tp(job: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMesh]:
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    yield job
    torch._dynamo.reset()


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Broken(Mlp):
    """With a graph break in the middle, and a collective before and behind it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        torch._dynamo.graph_break()
        return super().forward(x)


def parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    # No source rank: a fake process group sends nothing, and shards that come from another rank stay unwritten.
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}, src_data_rank=None)


class Spy:
    """`scatter_and_gather`; keeps what it sees."""

    def __init__(self) -> None:
        self.placements: list[Any] = []
        self.groups: Any = None

    def __call__(self, gm: fx.GraphModule) -> None:
        self.groups = gm.meta["groups"]
        self.placements += [str(p) for n in gm.graph.nodes for p in n.meta.get("placement", {}).values()]
        passes.scatter_and_gather(gm)


def test_placements_of_dtensors_reach_the_pass_and_the_program(tp: DeviceMesh) -> None:
    spy = Spy()
    backend = checked_backend(spy)
    torch.compile(parallel(Mlp(), tp), backend=backend)(torch.randn(4, 8))

    assert spy.placements == ["shard(0)", "shard(1)"]  # of the two weights; of x and the norm's weight nothing is known
    assert list(spy.groups.values()) == [(0, 1)]
    report = backend.passes[0].report()
    assert (report.status, report.calls, report.changed) == ("passed", 1, 1)


def test_forward_and_backward_graphs_are_verified(tp: DeviceMesh) -> None:
    backend = checked_backend(passes.scatter_and_gather)
    x = torch.randn(4, 8, requires_grad=True)
    torch.compile(parallel(Mlp(), tp), backend=backend)(x).sum().backward()

    report = backend.passes[0].report()
    assert (report.status, report.calls, report.changed) == ("passed", 2, 2)
    assert x.grad is not None
    assert "passed; 2 graphs, 2 changed" in backend.report()


def test_a_defect_ends_the_compile(tp: DeviceMesh) -> None:
    backend = checked_backend(passes.forget_sum)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        torch.compile(parallel(Mlp(), tp), backend=backend)(torch.randn(4, 8))
    assert isinstance(caught.value.inner_exception, WrongValue)
    assert "all_reduce" in str(caught.value)
    assert Path(backend.passes[0].report().cases[0]).exists()


def test_a_defect_is_logged_and_the_compile_goes_on_without_it(tp: DeviceMesh) -> None:
    torch.manual_seed(0)
    model, x = parallel(Mlp(), tp), torch.randn(4, 8)
    backend = checked_backend(passes.forget_sum, mode="log", fallback=True, minimise=0, report_dir=None)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    assert backend.passes[0].report().refuted == 1


def test_graph_breaks_make_several_graphs(tp: DeviceMesh) -> None:
    backend = checked_backend(passes.scatter_and_gather)
    with torch.no_grad():
        torch.compile(parallel(Broken(), tp), backend=backend)(torch.randn(4, 8))
    assert (backend.passes[0].report().changed, backend.passes[0].report().passed) == (2, 2)


def test_symbolic_sizes_stay_symbolic(tp: DeviceMesh) -> None:
    backend = checked_backend(passes.nothing)
    compiled = torch.compile(parallel(Mlp(), tp), backend=backend, dynamic=True)
    with torch.no_grad():
        for rows in (4, 6, 10):
            assert compiled(torch.randn(rows, 8)).shape == (rows, 8)
    assert backend.passes[0].report().calls == 1  # verification has guarded nothing


def test_graphs_with_symbolic_sizes_are_verified(tp: DeviceMesh) -> None:
    backend = checked_backend(passes.forget_sum, minimise=0)
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="WrongValue"):
        torch.compile(parallel(Mlp(), tp), backend=backend, dynamic=True)(torch.randn(6, 8))


def test_passes_run_one_after_the_other(tp: DeviceMesh) -> None:
    first = checked(passes.scatter_and_gather, placements={"*": {"tp": REPLICATED}})
    backend = checked_backend(first, passes.nothing)
    with torch.no_grad():
        torch.compile(parallel(Mlp(), tp), backend=backend)(torch.randn(4, 8))
    assert [one.report().changed for one in backend.passes] == [1, 0]
    assert backend.passes[0] is first


def test_the_compiler_is_given_the_rewritten_graph(tp: DeviceMesh) -> None:
    seen = []

    def compiler(gm: fx.GraphModule, inputs: Any) -> Any:
        seen.append(len(passes.waits(gm.graph)))
        return torch._functorch._aot_autograd.utils.make_boxed_func(gm.forward)

    with torch.no_grad():
        torch.compile(parallel(Mlp(), tp), backend=checked_backend(passes.scatter_and_gather, compiler=compiler))(
            torch.randn(4, 8)
        )
    assert seen == [2]


def test_unknown_compilers_are_refused() -> None:
    with pytest.raises(UsageError, match="no compiler 'gcc'"):
        checked_backend(passes.nothing, compiler="gcc")
    with pytest.raises(UsageError, match="requires at least one pass"):
        checked_backend()


def test_graphs_of_torch_dynamo_itself(tp: DeviceMesh) -> None:
    """A backend without AOTAutograd hands out torch functions: they are traced down to aten before and after."""
    pass_ = checked(_ordered)

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        return pass_(gm, inputs)

    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x) + dist._functional_collectives.all_reduce(x * 2, "sum", dist.group.WORLD)

    torch.compile(model, backend=backend)(torch.randn(4, 8))
    assert (pass_.report().status, pass_.report().changed) == ("passed", 1)


def _ordered(gm: fx.GraphModule, inputs: Any) -> fx.GraphModule:
    """a + b ⇒ b + a"""
    import operator

    for node in gm.graph.nodes:
        if node.target is operator.add:
            node.args = node.args[::-1]
    gm.recompile()
    return gm
