"""A matrix product is compiled for a GPU and returned. What is returned has the strides of the padded product: a view of it fails.

`keep_output_stride`, on by default, promises the strides of eager. Exit code 1: they differ. `force_shape_pad` takes the place of the
measurement by which a GPU decides; without a GPU, the pass that pads is told that it compiles for one.
"""

import sys
import warnings
from unittest import mock

import torch
from torch._inductor import config
from torch._inductor.fx_passes import pad_mm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


def run() -> torch.Tensor:
    settings = {"force_shape_pad": True, "shape_padding": True, "fx_graph_cache": False, "compile_threads": 1}
    as_on_gpu = {} if DEVICE == "cuda" else {"check_device": lambda *_: True, "has_triton": lambda: True}
    with config.patch(settings), mock.patch.multiple(pad_mm, **as_on_gpu):
        return torch.compile(step)(torch.ones(4, 8, device=DEVICE), torch.ones(8, 2, device=DEVICE))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if not (hasattr(pad_mm, "check_device") and hasattr(pad_mm, "has_triton") and hasattr(config, "force_shape_pad")):
        sys.exit(2)
    expected, got = torch.ones(4, 8) @ torch.ones(8, 2), run()
    try:
        flat = str(got.view(-1).tolist())
    except RuntimeError as error:
        flat = f"RuntimeError: {str(error).splitlines()[0]}"
    print(f"torch {torch.__version__}, {DEVICE}: expected strides {expected.stride()}, and {expected.view(-1).tolist()}")
    print(f"torch {torch.__version__}, {DEVICE}: got      strides {got.stride()}, and {flat}")
    sys.exit(int(got.stride() != expected.stride()))
