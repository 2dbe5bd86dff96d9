"""A tensor is split into parts of which the last one is smaller: compilation fails.

torch.compile with `normalization_aten_pass` among `post_grad_fusion_options`, without which no other pass on splits finds anything.
Exit code 1: compilation fails, or the result is wrong.
"""

import logging
import sys
import warnings

import torch
from torch._inductor import config


def step(a):
    first, last = a.split(2)
    return first + 1, last + 1


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable()  # torch logs where shapes do not fit, besides raising
    a = torch.tensor([1.0, 2.0, 3.0])
    expected = [one.tolist() for one in step(a)]
    try:
        with config.patch(post_grad_fusion_options={"normalization_aten_pass": {}}, fx_graph_cache=False):
            got = [one.tolist() for one in torch.compile(step)(a)]
    except Exception as error:
        if not any(says in str(error) for says in ("Split sizes", "split_with_sizes")):
            raise  # another error is not this defect
        got = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    print(f"torch {torch.__version__}: expected {expected}, got {got}")
    sys.exit(int(got != expected))
