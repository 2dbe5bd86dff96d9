"""The rows of a buffer change places. Compiled, they are written into the buffer from which they are still read."""

import sys

import torch
import torch._inductor.config as config


def step(x: torch.Tensor) -> None:
    x.copy_(torch.index_put(x, (torch.tensor([1, 0]),), x))


def run() -> tuple[list[list[float]], str]:
    expected, got = (torch.tensor([[1.0, 1.0], [2.0, 2.0]]) for _ in range(2))
    step(expected)
    # Kernels of eager refuse what is wrong here. Generated code does it: without this setting, which needs no C++ compiler but
    # which torch 2.9 does not have, the result is [[1, 1], [1, 1]].
    settings = {"fallback_by_default": True, "fx_graph_cache": False, "compile_threads": 1}
    known = config.get_config_copy()
    with config.patch({name: value for name, value in settings.items() if name in known}):
        try:
            torch.compile(step, fullgraph=True)(got)
        except RuntimeError as error:
            if "refer to a single memory location" not in str(error):
                raise
            return expected.tolist(), str(error)
    return expected.tolist(), str(got.tolist())


if __name__ == "__main__":
    expected, got = run()
    print(f"torch {torch.__version__}: expected {expected}, got {got}")
    sys.exit(int(str(expected) != got))
