"""FSDP on tensor parallel shards five rows over four ranks. A full state dict of the same rows cannot be loaded into them."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

DP, TP, ROWS = 2, 2, 5


def run(rank, folder, found):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=DP * TP)
    mesh = init_device_mesh("cpu", (DP, TP), mesh_dim_names=("dp", "tp"))
    layer = nn.Linear(1, ROWS, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(float(ROWS)).reshape(ROWS, 1))
    parallelize_module(layer, mesh["tp"], ColwiseParallel())
    fully_shard(layer, mesh=mesh["dp"])
    full = StateDictOptions(full_state_dict=True)
    taken = get_model_state_dict(layer, options=full)
    rows = taken["weight"].flatten().tolist()
    try:
        set_model_state_dict(layer, taken, options=full)
        said = layer.weight.full_tensor().flatten().tolist()
    except AssertionError as error:
        said = f"{type(error).__name__} {error}"
    found.put((rank, rows, said))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    spawn = mp.get_context("spawn")
    found = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [spawn.Process(target=run, args=(rank, folder, found)) for rank in range(DP * TP)]
        for one in ranks:
            one.start()
        results = sorted(found.get(timeout=100) for _ in ranks)
        for one in ranks:
            one.join()
    for rank, rows, said in results:
        print(f"rank {rank} got the rows {rows} of the model, and expected to load them; loaded: {said}")
    print(f"torch {torch.__version__}")
    sys.exit(any(rows != said for _, rows, said in results))
