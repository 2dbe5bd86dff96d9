"""Campaigns on Ray: slices are tasks, process groups are actors; scheduling, retries and membership are Ray's.

Importing this module imports neither ray nor torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tcverify.errors import UsageError
from tcverify.ray.address import LOCAL

if TYPE_CHECKING:
    from tcverify.workers import Crew


@contextmanager
def ray_crew(address: str, size: int | None, tell: Callable[[str], None]) -> Iterator[Crew]:
    """Yield the workers of a Ray cluster, as many as it has CPUs.

    Args:
        address: of the cluster, as `ray start` prints it, or `LOCAL`.
        size: largest number of slices in progress; None means one per CPU, including CPUs that join later.
        tell: called with one line if a worker has died.

    Raises:
        UsageError: ray is not installed, or there is no such cluster.
    """
    if importlib.util.find_spec("ray") is None:
        raise UsageError("ray is not installed, which --ray needs", "pip install 'tcverify[ray]'")
    from tcverify.ray.crew import RayCrew

    with RayCrew(address, size, tell) as crew:
        yield crew


__all__ = ["LOCAL", "ray_crew"]
