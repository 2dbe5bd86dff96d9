"""Graphs as torch.compile leaves them: of a small tensor-parallel model that a fake process group of eight ranks compiles."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

_COMPILED = """
import sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 4096, bias=False), nn.Linear(4096, 64, bias=False)
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x))) * self.scale.sum()

rank = int(sys.argv[1])
dist.init_process_group("fake", rank=rank, world_size=8, store=FakeStore())
mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
model = parallelize_module(Model(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}, src_data_rank=None)
torch.compile(model, fullgraph=True)(torch.zeros(32768, 64)).sum().backward()
"""


@cache
def traced(folder: Path, rank: int = 0) -> Path:
    """The log that TORCH_TRACE makes torch.compile write on a rank: it holds a forward and a backward graph."""
    target = folder / f"rank_{rank}"
    target.mkdir(parents=True)
    script = folder / "compiled.py"
    script.write_text(_COMPILED)
    settings = {"TORCH_TRACE": str(target), "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, str(script), str(rank)], check=True, capture_output=True, timeout=300,
        env={**os.environ, **settings},
    )  # fmt: skip
    (log,) = target.glob("*.log")
    return log
