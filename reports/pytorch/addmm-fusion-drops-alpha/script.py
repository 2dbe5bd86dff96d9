"""A product plus twice another tensor, compiled: the factor of two is lost. Exit code 1: it is."""

import sys

import torch


def step(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.add(x @ w, y, alpha=2)


if __name__ == "__main__":
    one = torch.ones(2, 2)
    expected, got = step(one, one, one).tolist(), torch.compile(step)(one, one, one).tolist()
    print(f"torch {torch.__version__}: expected {expected}, got {got}")
    sys.exit(int(expected != got))
