"""FSDP on tensor parallel shards seven rows over six ranks. What a checkpoint keeps of them has one row less."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

DP, TP, ROWS = 3, 2, 7


def run(rank, folder, found):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=DP * TP)
    mesh = init_device_mesh("cpu", (DP, TP), mesh_dim_names=("dp", "tp"))
    layer = nn.Linear(1, ROWS, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(float(ROWS)).reshape(ROWS, 1))
    parallelize_module(layer, mesh["tp"], ColwiseParallel())
    fully_shard(layer, mesh=mesh["dp"])
    (chunk,) = layer.weight.__create_chunk_list__()
    said = f"holds rows {layer.weight.to_local().flatten().tolist()}; its plan says {chunk.sizes[0]} from {chunk.offsets[0]}"
    try:
        dcp.save({"weight": layer.weight}, checkpoint_id=f"{folder}/checkpoint")
    except dcp.api.CheckpointException as error:
        said += f"; it cannot save them: {str(error).strip().splitlines()[-1]}"
    found.put((rank, said))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    spawn = mp.get_context("spawn")
    found = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [spawn.Process(target=run, args=(rank, folder, found)) for rank in range(DP * TP)]
        for one in ranks:
            one.start()
        for rank, said in sorted(found.get(timeout=100) for _ in ranks):
            print(f"rank {rank} {said}")
        for one in ranks:
            one.join()
        loaded = {"weight": torch.full((ROWS, 1), -1.0)}
        try:
            dcp.load(loaded, checkpoint_id=f"{folder}/checkpoint")
        except dcp.api.CheckpointException as error:
            print(f"torch {torch.__version__}: expected rows 0 to {ROWS - 1}; the checkpoint cannot be loaded:")
            print(str(error).strip().splitlines()[-1])
            sys.exit(1)
    got = loaded["weight"].flatten().tolist()
    print(f"torch {torch.__version__}: expected rows 0 to {ROWS - 1}, loaded {got}")
    sys.exit(got != list(map(float, range(ROWS))))
