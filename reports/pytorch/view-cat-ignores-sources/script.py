"""Reshaped pieces of two tensors are joined: the compiled result has the pieces of the first tensor alone.

torch.compile with `move_view_after_cat_aten_pass` among `post_grad_fusion_options`. Exit code 1: the result is wrong.
"""

import sys
import warnings

import torch
from torch._inductor import config

FUSIONS = {"normalization_aten_pass": {}, "move_view_after_cat_aten_pass": {}}


def step(a, b):
    return torch.cat([a.split(1)[0].reshape(2), b.split(1)[1].reshape(2)])



if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    inputs = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0], [7.0, 8.0]])]
    with config.patch(post_grad_fusion_options=FUSIONS, fx_graph_cache=False):
        got = torch.compile(step)(*inputs).tolist()
    expected = step(*inputs).tolist()
    print(f"torch {torch.__version__}: expected {expected}, got {got}")
    sys.exit(int(got != expected))
