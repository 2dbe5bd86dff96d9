"""A row of another tensor stands among rows that are joined: the compiled result has the row of the first tensor in its place.

torch.compile with `select_cat_aten_pass` among `post_grad_fusion_options`. Where the other part is no row of anything, compilation
fails. Exit code 1: a result is wrong, or compilation fails.
"""

import logging
import sys
import warnings

import torch
from torch._inductor import config

FUSIONS = {"normalization_aten_pass": {}, "select_cat_aten_pass": {}}


def other_source(a, b):
    return torch.cat([a[0], b[1]]), a[1].sum()


def no_row(a, b):
    return torch.cat([b.sum(0), a[1]])



if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable()  # torch logs where shapes do not fit, besides raising
    torch.manual_seed(0)
    inputs = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0], [7.0, 8.0]])]
    bad = 0
    for step in (other_source, no_row):
        try:
            with config.patch(post_grad_fusion_options=FUSIONS, fx_graph_cache=False):
                got = torch.compile(step)(*inputs)
            got = (got[0] if isinstance(got, tuple) else got).tolist()
        except Exception as error:
            if "tuple index out of range" not in str(error):
                raise  # another error is not this defect
            got = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        expected = step(*inputs)
        expected = (expected[0] if isinstance(expected, tuple) else expected).tolist()
        print(f"torch {torch.__version__}: {step.__name__}: expected {expected}, got {got}")
        bad |= got != expected
    sys.exit(int(bad))
