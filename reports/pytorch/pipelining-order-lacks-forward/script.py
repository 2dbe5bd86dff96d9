"""The actions that Schedule1F1B tells of its last rank begin with the forward of the second microbatch, not of the first."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        stage = PipelineStage(nn.Linear(2, 2), 0, 1, torch.device("cpu"))
        order = Schedule1F1B(stage, 2, loss_fn=torch.nn.functional.mse_loss).pipeline_order
        dist.destroy_process_group()
    if order is None:
        print(f"torch {torch.__version__} tells no actions of this schedule")
        sys.exit(2)
    forwards = [str(one) for one in order[0] if one is not None and one.computation_type.value == "F"]
    print(f"torch {torch.__version__}: expected the forwards 0F0 and 0F1, got {' and '.join(forwards)}")
    sys.exit(forwards != ["0F0", "0F1"])
