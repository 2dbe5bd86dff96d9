"""Two subtractions with `alpha` become one in a batch, and lose it.

torch.compile with `batch_aten_sub` among `post_grad_fusion_options`. Exit code 1: the results are those of a plain subtraction.
"""

import sys
import warnings

import torch
from torch._inductor import config

FUSIONS = {"batch_aten_sub": {"min_fuse_set_size": 2}}


def step(a, b):
    return torch.sub(a, b, alpha=2), torch.sub(b, a, alpha=2)



if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    inputs = [torch.randn(2, 3), torch.randn(2, 3)]
    with config.patch(post_grad_fusion_options=FUSIONS, fx_graph_cache=False):
        got = torch.compile(step)(*inputs)
    bad = 0
    for number, (is_, ought) in enumerate(zip(got, step(*inputs), strict=True)):
        print(f"torch {torch.__version__}: result {number}: expected {ought[0].tolist()}, got {is_[0].tolist()}")
        bad |= not torch.allclose(is_, ought)
    sys.exit(int(bad))
