"""Scenarios in one process, which can import libraries in one order only: run as a script, it plays them in children.

    python -m tests.coexistence.scenarios NAME[:STYLE] …

Prints one line of JSON per scenario: what it saw.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

from tests.coexistence import standin


def splits_reduction(gm: torch.fx.GraphModule) -> None:
    """Sound: all_reduce ⇒ reduce_scatter, all_gather. Tells and makes ops as user passes do, by identity."""
    ops = torch.ops.tensor_cast
    for node in list(gm.graph.nodes):
        if node.target is not ops.all_reduce.default:
            continue
        x, rank, group = node.args
        if x.meta["val"].shape[0] % len(group):
            continue
        with gm.graph.inserting_before(node):
            chunk = gm.graph.call_function(ops.reduce_scatter.default, (x, 0, rank, group))
            whole = gm.graph.call_function(ops.all_gather.default, (chunk, 0, rank, group))
        with x.meta["val"].fake_mode:
            chunk.meta["val"] = ops.reduce_scatter(x.meta["val"], 0, rank, group)
            whole.meta["val"] = ops.all_gather(chunk.meta["val"], 0, rank, group)
        node.replace_all_uses_with(whole)
        gm.graph.erase_node(node)
    gm.recompile()


def drops_reduction(gm: torch.fx.GraphModule) -> None:
    """Planted defect: the all_reduce is gone."""
    for node in list(gm.graph.nodes):
        if node.target is torch.ops.tensor_cast.all_reduce.default:
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
    gm.recompile()


def here(pass_: Callable[..., None]) -> Any:
    """The pass, applied in this process: no worker that has not imported the library."""
    from tcverify.application import InProcess
    from tcverify.application.loading import prepare_pass

    return InProcess(prepare_pass(pass_, "", {}))


def program() -> Any:
    """all_reduce, then rms_norm, on two ranks."""
    from tcverify.program import PARTIAL, InputSpec, Mesh, spmd_program

    inputs = [InputSpec("x", (4, 8), placements=(("tp", PARTIAL),)), InputSpec("w", (8,))]

    def build(b: Any) -> Any:
        x, w = b.input("x"), b.input("w")
        return b.call("tensor_cast::rms_norm", b.call("tensor_cast::all_reduce", x, b.rank, b.group("tp")), w, 1e-5)

    return spmd_program(Mesh.grid({"tp": 2}), inputs, build)


def seen(made: Any) -> dict[str, Any]:
    """What tcverify makes of a program in the process as it is now."""
    from tcverify import verify
    from tcverify.execution import Lockstep

    total = sum(made.values(rank)[0].double() for rank in range(2))
    expected = total * torch.rsqrt((total * total).mean(-1, keepdim=True) + 1e-5) * made.values(0)[1].double()
    run = Lockstep().run(made)
    current = {getattr(torch.ops.tensor_cast, name).default for name in ("all_reduce", "rms_norm")}
    calls = {n.target for n in made.graph(0).nodes if n.op == "call_function"}
    sound, defect = verify(here(splits_reduction), made), verify(here(drops_reduction), made)
    return {
        "right": all(torch.allclose(r.outputs[0], expected, rtol=1e-12, atol=0) for r in run.ranks),
        "current": calls == current,
        "sound": [sound.status, sound.changed, [str(f) for f in sound.findings + sound.doubts]],
        "defect": [defect.status, [f.kind for f in defect.findings]],
    }


def theirs() -> dict[str, Any]:
    """What the library's own op does on each device: the value, or the type of the error."""
    found = {}
    for device in ("cpu", "meta"):
        try:
            result = torch.ops.tensor_cast.all_reduce(torch.ones(2, device=device), 0, [0, 1])
        except Exception as error:  # noqa: BLE001 - the error is the observation
            found[device] = type(error).__name__
        else:
            found[device] = result.tolist() if device == "cpu" else list(result.shape)
    return found


def library_first(style: str) -> dict[str, Any]:
    standin.register(style)
    before = theirs()
    return {**seen(program()), "before": before, "after": theirs()}


def library_later(style: str) -> dict[str, Any]:
    """After tcverify's import, before any program is made, as in a notebook."""
    import tcverify  # noqa: F401

    return library_first(style)


def library_last(style: str) -> dict[str, Any]:
    """After a program has been made, whose graphs and graph modules hold tcverify's ops."""
    made = program()
    module = made.graph_module(0)
    own = [n.target for n in module.graph.nodes if n.op == "call_function"]
    standin.register(style)
    called = module(torch.ones(4, 8), torch.ones(8)).unique().tolist()
    stale = [n.target for n in module.graph.nodes if n.target is torch.ops.tensor_cast.all_reduce.default]
    from tcverify.program import dumps, loads

    again = seen(loads(dumps(made)))
    return {**seen(made), "again": again, "after": theirs(), "called": called, "stale": len(stale), "own": len(own)}


def gloo(style: str) -> dict[str, Any]:
    """On a process group, whose ranks know nothing of the library."""
    from tcverify import verify
    from tcverify.execution import ProcessGroupPool

    standin.register(style)
    made = program()
    with ProcessGroupPool(2, timeout=60) as pool:
        sound = verify(here(splits_reduction), made, confirm=pool)
        defect = verify(here(drops_reduction), made, confirm=pool, always_confirm=True)
    return {
        "sound": [sound.status, sound.executors, [str(f) for f in sound.findings + sound.doubts]],
        "defect": [defect.status, defect.executors, [f.kind for f in defect.findings]],
    }


SCENARIOS: dict[str, Callable[[str], dict[str, Any]]] = {
    f.__name__: f for f in (library_first, library_later, library_last, gloo)
}


def play(scenario: str) -> None:
    """Run a scenario in a child of this process and print what it saw."""
    name, _, style = scenario.partition(":")
    sys.stdout.flush()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        facts = SCENARIOS[name](style or "custom_op")
    except Exception as error:  # noqa: BLE001 - the test shows it
        facts = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    print(json.dumps({"scenario": scenario, **facts}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    import torch._dynamo
    import torch.fx.experimental.symbolic_shapes  # what of torch every scenario imports, once

    for argument in sys.argv[1:]:
        play(argument)
