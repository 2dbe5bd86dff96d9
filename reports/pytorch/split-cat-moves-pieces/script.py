"""Pieces of two tensors are joined alternately, or pieces of one tensor twice: the compiled result has them in another order, or too often.

torch.compile with `split_cat_aten_pass` among `post_grad_fusion_options`. Exit code 1: a result is wrong.
"""

import sys
import warnings

import torch
from torch._inductor import config

FUSIONS = {"normalization_aten_pass": {}, "split_cat_aten_pass": {"threshold_to_cat": 2}}


def alternately(a, b):
    (a0, a1), (b0, b1) = a.split(1), b.split(1)
    return torch.cat([a0, b0, a1, b1])


def twice(a, b):
    a0, a1 = a.split(1)
    return torch.cat([a0, a1, a0, a1])



if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    inputs = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
    bad = 0
    for step in (alternately, twice):
        with config.patch(post_grad_fusion_options=FUSIONS, fx_graph_cache=False):
            got = torch.compile(step)(*inputs).tolist()
        expected = step(*inputs).tolist()
        print(f"torch {torch.__version__}: {step.__name__}: expected {expected}, got {got}")
        bad |= got != expected
    sys.exit(int(bad))
