"""Like ops on tensors of different dtypes become one in a batch, and the results have another dtype.

torch.compile with `batch_aten_tanh`, `batch_aten_relu` or `batch_linear_post_grad` among `post_grad_fusion_options`. Exit code 1: a
result has another dtype than in eager.
"""

import sys
import warnings

import torch
from torch._inductor import config

FUSIONS = {
    "batch_aten_tanh": {"min_fuse_set_size": 2},
    "batch_aten_relu": {"min_fuse_set_size": 2},
    "batch_linear_post_grad": {"min_fuse_set_size": 2},
}


def tanh(a, b):
    return torch.tanh(a), torch.tanh(b)


def relu(a, b):
    return torch.relu(a), torch.relu(b.int())


def product(a, b):
    return a @ a, b @ b



if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    inputs = [torch.randn(4, 4), torch.randn(4, 4, dtype=torch.bfloat16)]
    bad = 0
    for step in (tanh, relu, product):
        with config.patch(post_grad_fusion_options=FUSIONS, fx_graph_cache=False):
            got = [one.dtype for one in torch.compile(step)(*inputs)]
        expected = [one.dtype for one in step(*inputs)]
        print(f"torch {torch.__version__}: {step.__name__}: expected {expected}, got {got}")
        bad |= got != expected
    sys.exit(int(bad))
