"""Three all_gathers, one of an empty shard, are bucketed and compiled for a GPU: the scheduler finds a cycle.

Without a GPU, the CPU's backend says that it has kernels of several results, as backends of GPUs do; it has none, so that generating
code fails later where no cycle is found. Exit code 1: there is a cycle.
"""

import sys
import warnings
from unittest import mock

import torch
import torch.distributed as dist
from torch._inductor import config
from torch._inductor.codegen import common, cpp
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._ordered_set import OrderedSet

RANKS = 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OP = torch.ops._c10d_functional


def step(*shards: torch.Tensor) -> list[torch.Tensor]:
    group = dist.group.WORLD.group_name
    return [OP.wait_tensor(OP.all_gather_into_tensor(shard, RANKS, group)) + 1 for shard in shards]


def run() -> str | None:
    settings = {"bucket_all_gathers_fx": "all", "fx_graph_cache": False, "compile_threads": 1}
    features = cpp.CppScheduling.backend_features
    if DEVICE == "cpu":
        features = OrderedSet([*features, common.BackendFeature.FOREACH])
    shards = [torch.ones(rows, 3, device=DEVICE) for rows in (2, 0, 2)]
    with config.patch(settings), mock.patch.object(cpp.CppScheduling, "backend_features", features):
        try:
            torch.compile(step, fullgraph=True)(*shards)
        except Exception as error:
            return next((line for line in str(error).splitlines() if "Cycle" in line), None)
    return None


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if not hasattr(config, "bucket_all_gathers_fx") or not hasattr(common.BackendFeature, "FOREACH"):
        sys.exit(2)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    raised = run()
    dist.destroy_process_group()
    print(f"torch {torch.__version__}, {DEVICE}: expected no cycle, got {raised}")
    sys.exit(int(raised is not None))
