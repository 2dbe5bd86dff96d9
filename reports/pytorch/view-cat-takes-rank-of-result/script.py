"""Pieces of a matrix are reshaped and joined along another dim: compilation fails.

torch.compile with `move_view_after_cat_aten_pass` among `post_grad_fusion_options`. Exit code 1: compilation fails, or the result is
wrong.
"""

import logging
import sys
import warnings

import torch
from torch._inductor import config

FUSIONS = {"normalization_aten_pass": {}, "move_view_after_cat_aten_pass": {}}


def step(a):
    return torch.cat([piece.reshape(4, 2) for piece in a.split(2)], 1)



if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable()  # torch logs where shapes do not fit, besides raising
    torch.manual_seed(0)
    a = torch.arange(16.0).reshape(4, 4)
    expected = step(a).tolist()
    try:
        with config.patch(post_grad_fusion_options=FUSIONS, fx_graph_cache=False):
            got = torch.compile(step)(a).tolist()
    except Exception as error:
        if "Dimension out of range" not in str(error):
            raise  # another error is not this defect
        got = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    print(f"torch {torch.__version__}: expected {expected}, got {got}")
    sys.exit(int(got != expected))
