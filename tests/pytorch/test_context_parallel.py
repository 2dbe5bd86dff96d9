"""Context parallelism: it passes where it is sound, planted defects of it show, and so do the known ones of torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tcverify.pytorch.subjects import SUBJECTS

if not SUBJECTS["context_parallel"].here:
    pytest.skip(f"it can be verified with {SUBJECTS['context_parallel'].versions}", allow_module_level=True)

from torch.distributed.tensor.experimental._context_parallel import _attention, _load_balancer

from tcverify.errors import Unsupported
from tcverify.execution import ProcessGroupPool
from tcverify.program import Mesh, Program
from tcverify.pytorch.context_parallel import ContextParallel
from tcverify.pytorch.recording import CollectiveRecorder
from tcverify.strategies.training.attention import AttentionStep, attention_program
from tcverify.verification.verifier import verify

LINE = Mesh.grid({"cp": 2})
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


def program(mesh: Mesh = LINE, told: dict[str, Any] | None = None, **facts: Any) -> Program:
    step = AttentionStep(**{"length": 8, "size": 8, **facts})
    return replace(attention_program(mesh, step), options={**step.options(), **(told or {})})


def refuted(given: Program) -> set[str]:
    verdict = verify(ContextParallel(), given)
    assert verdict.status == "refuted", verdict.doubts
    return {finding.kind for finding in verdict.findings}


SOUND: dict[str, Program] = {
    "three ranks": program(Mesh.grid({"cp": 3}), length=12),
    "sent around": program(Mesh.grid({"cp": 3}), {"rotate": "alltoall"}, length=12),
    "not balanced": program(Mesh.grid({"cp": 3}), {"balanced": False}, length=9),
    "everywhere": program(told={"balanced": False, "rotate": "alltoall"}, layers=("",)),
    "cudnn": program(layers=("causal shared", "causal placed"), heads=2, kernel="cudnn"),
    "recomputed": program(told={"recompute": True}, layers=("causal placed", "causal scaled")),
    "under data parallelism": program(Mesh.grid({"dp": 2, "cp": 2}), batch=2, shown="heads"),
    "modules, recomputed": program(
        told={"api": "modules", "recompute": True, "backward": "outside", "balanced": False}
    ),
}


@pytest.mark.parametrize("given", SOUND.values(), ids=SOUND)
def test_sound_steps_pass(given: Program) -> None:
    verdict = verify(ContextParallel(), given)
    assert verdict.status == "passed", verdict.doubts or verdict.findings
    assert verdict.changed


@pytest.mark.skipif(TORCH < (2, 12), reason="this torch loses small heads; a finding, whose folder has a script")
def test_small_heads_are_filled_up() -> None:
    verdict = verify(ContextParallel(), program(size=4, layers=("causal", "causal scaled")))
    assert verdict.status == "passed", verdict.doubts or verdict.findings


@pytest.mark.skipif(
    TORCH < (2, 11), reason="this torch writes into a batch that it divides; a finding, whose folder has a script"
)
@pytest.mark.parametrize("buffers", ["copies", "views"])
def test_parts_that_are_made_leave_the_batch_as_it_is(buffers: str) -> None:
    told = {"api": "modules", "rotate": "alltoall", "buffers": buffers}
    verdict = verify(ContextParallel(), program(Mesh.grid({"cp": 3}), told, length=12, layers=("causal placed",)))
    assert verdict.status == "passed", verdict.doubts or verdict.findings


def test_what_lockstep_passes_also_passes_on_gloo(pool: Callable[[int], ProcessGroupPool]) -> None:
    verdict = verify(ContextParallel(), program(told={"rotate": "alltoall"}), confirm=pool(2))
    assert verdict.status == "passed", verdict.doubts or verdict.findings
    assert verdict.executors == ["lockstep", "gloo"]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (program(layers=("causal", "")), "Load balancing"),
        (program(layers=("",), told={"api": "modules"}), "Load balancing"),
        (program(length=6, told={"api": "modules"}), "cannot be balanced"),
        (program(Mesh.grid({"tp": 2})), "no dim 'cp'"),
        (program(told={"recompute": True, "backward": "outside"}), "behind the context"),
        (program(told={"length": 4}), "is not the training step"),
        (program(told={"kernel": "math"}), "describe no training step"),
    ],
)
def test_what_is_not_supported_is_declined(given: Program, why: str) -> None:
    (doubt,) = verify(ContextParallel(), given).doubts
    assert (doubt.reason, why in doubt.detail) == ("declined", True), doubt


def test_nothing_is_left_behind() -> None:
    function = torch.nn.functional.scaled_dot_product_attention
    handlers = dict(torch.distributed.tensor.DTensor._op_dispatcher._custom_op_handlers)
    settings = replace(_attention._cp_options)
    for told in ({"balanced": False}, {"api": "modules", "rotate": "alltoall"}):
        verify(ContextParallel(), program(told=told))
        assert torch.nn.functional.scaled_dot_product_attention is function
        assert torch.distributed.tensor.DTensor._op_dispatcher._custom_op_handlers == handlers
        assert _attention._cp_options == settings


def test_no_drawing_is_needed() -> None:
    """It is imported where numpy is missing, and leaves no module behind that is none."""
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "from tcverify.pytorch.compat import import_debugging; import_debugging()\n"
        "import torch.distributed.tensor.experimental._context_parallel._sharding_rules\n"
        "print([name for name in sys.modules if 'visualize' in name])"
    )
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "[]\n"), run.stderr


# --------------------------------------------------------------------------------------------------- planted defects


@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
def test_keys_of_another_rank_refute(rotate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values come from the rank before this one; from the one behind it, masks are others."""
    name = "_AllGatherRotater" if rotate == "allgather" else "_AllToAllRotater"
    kind = getattr(_attention, name)

    def turned(self: Any, buffer: torch.Tensor) -> None:
        exchange(self, buffer.flip(0))

    exchange = kind.exchange_buffers
    monkeypatch.setattr(kind, "exchange_buffers", turned)
    assert refuted(program(told={"rotate": rotate})) == {"wrong-value"}


def test_parts_that_are_merged_without_their_weights_refute(monkeypatch: pytest.MonkeyPatch) -> None:
    def halved(self: Any, out: torch.Tensor, lse: torch.Tensor, partial: bool) -> None:
        step(self, out, torch.zeros_like(lse), partial)

    step = _attention._SDPAMerger.step
    monkeypatch.setattr(_attention._SDPAMerger, "step", halved)
    assert refuted(program()) == {"wrong-value"}


def test_gradients_of_the_other_half_refute(monkeypatch: pytest.MonkeyPatch) -> None:
    update = _attention._partial_update

    def other(original: Any, new: Any, dim: int, n_chunks: int, idx: int, add: bool) -> Any:
        return update(original, new, dim, n_chunks, 1 - idx if add else idx, add)

    monkeypatch.setattr(_attention, "_partial_update", other)
    assert refuted(program()) == {"wrong-value"}


def test_tokens_in_another_order_refute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Front and back of the sequence change places, which the mask does not know."""
    generate = _load_balancer._HeadTailLoadBalancer._generate_indices
    monkeypatch.setattr(
        _load_balancer._HeadTailLoadBalancer, "_generate_indices",
        lambda self, restore=False: generate(self, restore).flip(1),
    )  # fmt: skip
    assert "wrong-value" in refuted(program())


# ----------------------------------------------------------------------------------------------- what torch itself does


def test_buffers_that_share_memory_are_overwritten() -> None:
    """A finding; its folder has a script."""
    assert refuted(program(told={"buffers": "views"})) == {"wrong-value"}


def test_a_backward_behind_the_context_masks_other_tokens() -> None:
    """A finding; its folder has a script. Where nothing is balanced, the order of tokens is that of the mask."""
    assert refuted(program(told={"backward": "outside"})) == {"wrong-value"}
    assert verify(ContextParallel(), program(told={"backward": "outside", "balanced": False})).status == "passed"


def test_positions_in_the_first_dim_are_not_put_back() -> None:
    """A finding; its folder has a script. Where nothing is balanced, nothing has to be put back."""
    assert refuted(program(shown="positions")) == {"wrong-value"}
    assert refuted(program(shown="positions", length=16)) == {"pass-raised"}
    assert verify(ContextParallel(), program(shown="positions", told={"balanced": False})).status == "passed"


def test_efficient_attention_wants_parts_of_full_blocks() -> None:
    """A finding; its folder has a script."""
    assert refuted(program(kernel="efficient", length=64)) == {"pass-raised"}
    assert verify(ContextParallel(), program(kernel="efficient", length=128)).status == "passed"


# ------------------------------------------------------------------------------------------------------------- records


def recorded(rows: int) -> Any:
    """What is recorded of a tensor that is given another number of rows, and then read."""
    memory = torch.zeros(4, 2)
    recorder = CollectiveRecorder()
    recorder.input("memory", memory)
    with recorder:
        part = memory[1:]
        part.resize_(rows, 2)
        made = recorder.finish(part + 1)
    return made


def test_a_tensor_with_another_shape_is_a_view_of_its_memory() -> None:
    memory = torch.arange(8.0).reshape(4, 2)
    assert torch.equal(recorded(2)(memory), memory[1:3] + 1)


def test_a_tensor_that_gets_more_memory_is_declined() -> None:
    with pytest.raises(Unsupported, match="more memory"):
        recorded(5)


@pytest.mark.parametrize(
    "numbers", [[[0, 1, 2], [7, 6, 4]], [5], [], 3, [0.5, 1.5, 2.5], [True, False, False]], ids=str
)
def test_numbers_that_code_has_written_are_recorded(numbers: Any) -> None:
    recorder = CollectiveRecorder()
    recorder.input("x", torch.zeros(1))
    with recorder:
        made = recorder.finish([torch.tensor(numbers)])
    (found,) = made(torch.ones(1))
    torch.testing.assert_close(found, torch.tensor(numbers))
