"""A small Llama under tensor parallelism, compiled with a pass that is verified during the compile.

    python docs/llama_tp.py                                 # two ranks on this machine
    torchrun --nproc-per-node 2 docs/llama_tp.py            # the same
    python docs/llama_tp.py --defect residual_first         # a pass with a defect: the compile ends with the counterexample

The defects are in docs/llama_passes.py; "all" runs the sound pass and then each of them.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import tcverify
from tcverify.passes.sequence_parallel import SequenceParallel

RANKS, WORDS, HIDDEN, HEADS, LAYERS = 2, 64, 32, 4, 2
DEFECTS = ("residual_first", "own_rows", "no_waits")

PLAN = {
    "wq": ColwiseParallel, "wk": ColwiseParallel, "wv": ColwiseParallel, "wo": RowwiseParallel,
    "w1": ColwiseParallel, "w3": ColwiseParallel, "w2": RowwiseParallel,
}  # fmt: skip


class Block(nn.Module):
    """Attention and SwiGLU, each after an RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.w1, self.w3 = (nn.Linear(HIDDEN, 2 * HIDDEN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(HIDDEN, eps=1e-5) for _ in range(2))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (
            project(x).view(batch, tokens, -1, HIDDEN // HEADS).transpose(1, 2)
            for project in (self.wq, self.wk, self.wv)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(attended.transpose(1, 2).reshape(batch, tokens, -1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.attention_norm(x))
        y = self.mlp_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.head = nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def say(text: str) -> None:
    """Print in one go, so that the lines of the ranks do not mix."""
    sys.stdout.write(f"[rank {dist.get_rank()}] {text}\n")
    sys.stdout.flush()


def run(pass_: object, report_dir: str) -> int:
    """Compile the model on this rank and compare with the eager model; returns an exit code."""
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)  # the same parameters on all ranks, before they are divided
    model = Llama()
    for block in model.blocks:
        parallelize_module(block, mesh, {name: style() for name, style in PLAN.items()})
    words = torch.randint(0, WORDS, (2, 8))

    # Tensors that parallelize_module does not divide are equal on all ranks of tp: declare this for pass and verification.
    equal = {"*": {"tp": tcverify.REPLICATED}}
    backend = tcverify.checked_backend(pass_, placements=equal, report_dir=report_dir)
    code = 0
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        expected = model(words)
        try:
            actual = torch.compile(model, backend=backend)(words)
        except torch._dynamo.exc.BackendCompilerFailed as error:  # it wraps exceptions of a backend
            say(f"refuted\n{error.inner_exception}")
            code = 1
        else:
            torch.testing.assert_close(actual, expected)
            say("equal to eager")
    say(backend.report())
    return code


def main(arguments: argparse.Namespace) -> int:
    """What one rank does; returns its exit code."""
    import llama_passes

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    passes: dict[str, object] = {"none": SequenceParallel()}
    passes.update((name, getattr(llama_passes, name)) for name in DEFECTS)
    chosen = passes if arguments.defect == "all" else [arguments.defect]
    try:
        code = max(run(passes[name], arguments.report_dir) for name in chosen)
        dist.barrier()  # rank 0 holds the store, which the others may still be using
        return code
    finally:
        dist.destroy_process_group()


def start_rank(rank: int, port: int, arguments: argparse.Namespace) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sys.exit(main(arguments))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--defect", choices=("none", *DEFECTS, "all"), default="none")
    parser.add_argument("--report-dir", default=str(Path(tempfile.gettempdir()) / "llama_tp"))
    given = parser.parse_args()
    if "RANK" in os.environ:  # started by torchrun
        sys.exit(main(given))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    processes = [context.Process(target=start_rank, args=(rank, port, given)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in processes))
