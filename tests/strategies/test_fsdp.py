"""FSDP programs: what their choices say shows in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tcverify.execution import Lockstep
from tcverify.ops import RESIZE, lookup
from tcverify.program import Mesh, MeshDim, Program
from tcverify.strategies.fsdp.choices import LAYER, MOST_LAYERS, WIDTH, decode_fsdp_choices, encode_fsdp_choices
from tcverify.strategies.fsdp.programs import decode_fsdp

DP2 = Mesh.grid({"dp": 2})
GRID = Mesh.grid({"dp": 2, "tp": 2})
UNEVEN = Mesh(3, (MeshDim("tp", ((0,), (1, 2))),))


def program(*layers: dict[str, Any], mesh: Mesh = DP2, **setting: Any) -> Program:
    return decode_fsdp(mesh, encode_fsdp_choices(setting, list(layers)))


def count(made: Program, op: str, rank: int = 0) -> int:
    return sum(n.op == "call_function" and lookup(n.target).name == op for n in made.graph(rank).nodes)


def test_choices_round_trip() -> None:
    setting, layers, timing = decode_fsdp_choices(
        encode_fsdp_choices({"dtypes": "mixed", "seed": 7}, [{"kind": "mlp"}, {"twist": "kept", "reuse": True}])
    )
    assert (setting.layers, setting.dtypes, setting.seed) == (2, "mixed", 7)
    assert [layer.kind for layer in layers] == ["mlp", LAYER["kind"][0]]
    assert (layers[1].twist, layers[1].reuse) == ("kept", True)
    assert not any(timing)
    with pytest.raises(ValueError, match="no such choices"):
        encode_fsdp_choices({}, [{"padded": True}])
    assert all(len(decode_fsdp_choices(bytes([byte]) * 2 * WIDTH)[1]) <= MOST_LAYERS for byte in range(256))


def test_layers_gather_copy_and_free_and_gradients_are_scattered() -> None:
    made = program({}, {"kind": "mlp"}, backward=True)
    assert count(made, "_c10d_functional::all_gather_into_tensor") == 4  # twice: forward and backward
    assert count(made, "fsdp::copy_") == 6
    assert count(made, "_c10d_functional::reduce_scatter_tensor") == count(made, "fsdp::chunk_cat") == 2
    assert count(made, RESIZE) == 3 + 2 * 6  # freed at the beginning; allocated and freed around each use
    kept = program({}, {"kind": "mlp"}, backward=True, reshard=False)
    assert count(kept, "_c10d_functional::all_gather_into_tensor") == 2


def test_a_gathered_layer_computes_what_its_parameter_computes() -> None:
    """tanh(x @ w), with w put together of the shards of all ranks."""
    for setting in ({}, {"gather": "out"}, {"copy_out": "views"}, {"copy_out": "direct"}, {"target": "value"}):
        made = program({}, backward=False, **setting)
        run = Lockstep().run(made)
        names = run.ranks[0].input_names
        w = torch.cat([result.inputs[names.index("w0_shard")] for result in run.ranks])
        for result in run.ranks:
            torch.testing.assert_close(result.outputs[0], torch.tanh(result.inputs[names.index("x")] @ w))


def test_gradients_are_summed_over_the_ranks() -> None:
    made = program({}, backward=True, reduce="sum", copy_out="views")
    run = Lockstep().run(made)
    names = run.ranks[0].input_names
    total = sum(r.inputs[names.index("x")].t() @ (0.5 * r.outputs[0]) for r in run.ranks)
    gradient = torch.cat([r.outputs[1] for r in run.ranks])
    torch.testing.assert_close(gradient, total)


@pytest.mark.parametrize("mesh", [DP2, GRID, UNEVEN], ids=str)
@pytest.mark.parametrize("dtypes", ["f32", "mixed", "bf16", "low", "late"])
def test_shards_that_do_not_divide_are_padded(mesh: Mesh, dtypes: str) -> None:
    made = program({"kind": "bias"}, {"kind": "norm"}, mesh=mesh, uneven=1, hidden=2, dtypes=dtypes, backward=True)
    shards = {spec.name: spec for spec in made.inputs}
    assert shards["w0_shard"].shape[0] == shards["w0"].shape[0] + 1
    run = Lockstep().run(made)
    assert run.finished
    assert all(bool(value.isfinite().all()) for result in run.ranks for value in result.outputs)


def test_gradients_of_hybrid_sharding_are_reduced_over_the_other_dim_too() -> None:
    made = program({}, mesh=GRID, backward=True, hybrid=True)
    assert count(made, "_c10d_functional::all_reduce") == 1
    assert count(program({}, mesh=UNEVEN, backward=True, hybrid=True), "_c10d_functional::all_reduce") == 0


def test_prefetching_starts_the_next_all_gather_early() -> None:
    for prefetch, expected in (("none", "gmgm"), ("early", "gwgmwm"), ("overlapping", "ggwmwm")):
        made = program({}, {}, prefetch=prefetch, backward=False)
        letters = {
            "_c10d_functional::all_gather_into_tensor": "g",
            "_c10d_functional::wait_tensor": "" if prefetch == "none" else "w",
            "aten::mm": "m",
        }
        found = "".join(letters.get(lookup(n.target).name, "") for n in made.graph(0).nodes if n.op == "call_function")
        assert found == expected


@pytest.mark.parametrize("twist", dict.fromkeys(LAYER["twist"]))
@pytest.mark.parametrize("prologue", [True, False])
def test_every_twist_runs(twist: str, prologue: bool) -> None:
    made = program({"twist": twist}, {"twist": twist, "reuse": True}, {}, prologue=prologue, backward=True)
    run = Lockstep().run(made)
    assert run.finished
    outputs = [value for result in run.ranks for value in result.outputs]
    assert all(bool(value.isfinite().all()) for value in outputs)
    plain = program({}, {"reuse": True}, {}, prologue=prologue, backward=True)
    assert (str(plain.graph(0)) != str(made.graph(0))) == (twist != "none")
