"""A product plus twice another tensor, and attention with twice a mask, compiled: the factor of two is lost. Exit code 1: it is."""

import sys
import warnings

import torch

Tensor = torch.Tensor


def linear(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return torch.add(x @ w, y, alpha=2)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(-2, -1)).div(8.0)
    return torch.softmax(torch.add(scores, mask, alpha=2), -1).matmul(v)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    one, rows = torch.ones(2, 2), torch.eye(16, 64).expand(1, 2, 16, 64)
    right = True
    for step, inputs in ((linear, (one, one, one)), (attention, (rows, rows, rows, torch.eye(16).expand(1, 1, 16, 16)))):
        expected, got = step(*inputs).flatten(), torch.compile(step)(*inputs).flatten()
        same = torch.allclose(expected, got, atol=1e-4)
        right &= same
        print(f"{step.__name__}: expected {expected[0]:.3f}, got {got[0]:.3f}")
    sys.exit(int(not right))
