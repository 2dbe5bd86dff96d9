"""Fixtures for all tests."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from tcverify.execution import ProcessGroupPool

torch.set_num_threads(1)  # as the command line does: the tensors are small, and more threads only wait for each other

#: When the time for tests is over, by the monotonic clock, as `tests.quick` says.
UNTIL = "TCVERIFY_TESTS_UNTIL"


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], ProcessGroupPool]]:
    """Gives the pool of a world size: `pool(2)`. Pools live until the end of the session; do not break them.

    Ranks compute on TCVERIFY_TESTS_DEVICE: "cpu" unless it says "cuda".
    """
    device: Any = os.environ.get("TCVERIFY_TESTS_DEVICE", "cpu")
    pools: dict[int, ProcessGroupPool] = {}
    with ExitStack() as stack:

        def get(world_size: int) -> ProcessGroupPool:
            if world_size not in pools:
                pools[world_size] = stack.enter_context(ProcessGroupPool(world_size, device=device, timeout=60))
            return pools[world_size]

        yield get


def pytest_runtest_setup() -> None:
    if time.monotonic() > float(os.environ.get(UNTIL, "inf")):
        pytest.skip("the time is over; `make test` runs it")


def pytest_configure() -> None:
    """A shell that starts tests in the background has them ignore Ctrl-C, which the processes that they start would inherit."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
