"""What holds of models with attention that are drawn for context parallelism."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import Phase, find, settings
from torch.nn import functional as F

from tcverify.errors import Unsupported
from tcverify.execution import Lockstep
from tcverify.program import Mesh, dumps, loads
from tcverify.strategies import attention_programs
from tcverify.strategies.training.attention import (
    KERNELS,
    SHOWN,
    WIDTH,
    AttentionStep,
    attention_program,
    decode_attention,
    decode_step,
    grid,
)

ALONE = Mesh.grid({"cp": 1})


def expected(step: AttentionStep, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What torch gives, with its own attention and autograd."""
    own = {name: value.double().requires_grad_() for name, value in values.items()}
    x = own["tokens"][:, :-1].detach().requires_grad_()
    h = x
    for number, layer in enumerate(step.layers):
        words = layer.split()
        parts = [h @ own[f"{name}{number}"] for name in "qkv"]
        q, k, v = (one.reshape(*one.shape[:2], -1, step.size).permute(0, 2, 1, 3) for one in parts)
        if "placed" in words:
            q, k = q * own["positions"], k * own["positions"]
        told = {"scale": 0.75} if "scaled" in words else {}
        found = F.scaled_dot_product_attention(q, k, v, is_causal="causal" in words, enable_gqa=True, **told)
        h = h + found.permute(0, 2, 1, 3).reshape(h.shape)
    loss = ((h - own["tokens"][:, 1:]) ** 2).sum()
    loss.backward()
    return {"loss": loss, "h": h, "x": x.grad, **{name: own[name].grad for name in own if name[1:].isdigit()}}


STEPS: dict[str, dict[str, Any]] = {
    "flash": {"size": 8},
    "small heads": {"heads": 2, "size": 4},
    "everywhere": {"layers": ("",)},
    "two layers": {"layers": ("causal placed", "scaled"), "batch": 2},
    "shared keys": {"layers": ("causal shared",), "heads": 2, "kernel": "cudnn"},
    "efficient": {"kernel": "efficient", "layers": ("scaled causal",), "heads": 2},
}


@pytest.mark.parametrize("facts", STEPS.values(), ids=STEPS)
def test_steps_compute_attention_and_its_gradients(facts: dict[str, Any]) -> None:
    step = AttentionStep(**facts)
    program = attention_program(ALONE, step)
    run = Lockstep().run(program)
    assert run.finished, run.why
    wanted = expected(step, dict(zip(step.inputs(), program.values(0), strict=True)))
    weights = [name for name in step.inputs() if name not in ("tokens", "positions")]
    loss, outputs, *grads = run.ranks[0].outputs[: 3 + len(weights)]
    torch.testing.assert_close(loss.double(), wanted["loss"].detach())
    torch.testing.assert_close(outputs.double(), wanted["h"].detach())
    for name, grad in zip(["x", *weights], grads, strict=True):
        torch.testing.assert_close(grad.double(), wanted[name], msg=name)


@pytest.mark.parametrize("shown", SHOWN)
def test_outputs_are_returned_with_their_positions_in_a_dim(shown: str) -> None:
    step = AttentionStep(batch=2, length=5, heads=3, shown=shown)
    outputs = Lockstep().run(attention_program(ALONE, step)).ranks[0].outputs[1]
    assert outputs.shape[SHOWN[shown][0]] == step.length


def test_ranks_of_other_dims_have_sequences_of_their_own() -> None:
    program = attention_program(Mesh.grid({"dp": 2, "cp": 2}), AttentionStep())
    tokens = [program.values(rank)[0] for rank in range(4)]
    assert torch.equal(tokens[0], tokens[1])
    assert not torch.equal(tokens[0], tokens[2])


def test_any_bytes_decode_and_are_read_back() -> None:
    for choices in (b"", b"\xff" * WIDTH, bytes(range(60, 60 + WIDTH))):
        for mesh in (ALONE, Mesh.grid({"tp": 2}), Mesh.grid({"dp": 2, "cp": 2})):
            program = decode_attention(mesh, choices)
            assert dumps(loads(dumps(program))) == dumps(program)
            step = AttentionStep.of(program.options)
            assert AttentionStep.of({**step.options(), "layers": list(step.layers)}) == step


def test_steps_of_all_kinds_are_drawn() -> None:
    draws = random.Random(0)
    steps = [decode_step(3, draws.randbytes(WIDTH)) for _ in range(300)]
    words = Counter(word for step in steps for layer in step.layers for word in layer.split())
    assert set(words) == {"causal", "scaled", "shared", "placed"}
    assert {step.kernel for step in steps} == set(KERNELS)
    assert {step.shown for step in steps} == set(SHOWN)
    assert {len(step.layers) for step in steps} == {step.batch for step in steps} == {1, 2}
    masked = {all("causal" in layer.split() for layer in step.layers) for step in steps}
    assert {True, False} == masked == {step.length % 6 == 0 for step in steps}
    assert all(step.length % 3 == 0 for step in steps)


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": ()},
        {"layers": ("sideways",)},
        {"layers": 3},
        {"kernel": "math"},
        {"shown": "all"},
        {"heads": 0},
        {"length": "4"},
        {"length": 4.5},
        {"length": 1 << 20},
        {"kernel": "efficient", "layers": ("shared",)},
    ],
)
def test_options_that_describe_no_step_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match="describe no training step"):
        AttentionStep.of({**AttentionStep().options(), **changes})


def test_meshes_are_those_that_are_asked_for() -> None:
    first = settings(max_examples=10, phases=[Phase.generate], database=None)
    wanted = Mesh.grid({"cp": 3})
    assert find(attention_programs(mesh=wanted), lambda program: True, settings=first).mesh == wanted
    assert find(attention_programs(world_size=4), lambda program: True, settings=first).world_size == 4
    assert [len(grid(size, 2).dims) for size in (2, 3, 4)] == [1, 1, 2]
