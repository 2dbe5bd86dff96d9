"""The common base of PyTorch's passes, which adapts them to tcverify's interface."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from tcverify.errors import Unsupported, UsageError
from tcverify.program import Contract
from tcverify.pytorch.end_to_end.pipeline import Pipeline
from tcverify.pytorch.groups import groups_of
from tcverify.pytorch.subjects import PREFIX, SUBJECTS


class TorchPass:
    """Applies a pass of PyTorch to the graph of one rank, in place, with the options of the program or of the command line.

    Subclasses name their subject and define in `rewrite` how it is called. PyTorch promises nothing about metadata, so it is
    propagated again.

    Args:
        options: fixed for all programs; others come from each program.

    Raises:
        UsageError: this torch has no such pass, or the pass no such option.
    """

    #: Of the subject, with the prefix.
    name: ClassVar[str]
    contract = Contract(metadata=False)

    def __init__(self, **options: Any) -> None:
        facts = SUBJECTS[self.name.removeprefix(PREFIX)]
        if not facts.here:
            raise UsageError(
                f"torch {torch.__version__} has no {facts.source}",
                f"'{self.name}' can be verified with {facts.versions}",
            )
        with _quiet():
            # Importing Inductor takes seconds, which are none of the time that the first application may take.
            importlib.import_module(facts.source.partition(":")[0])
        self._fixed = {name: _read(name, value, facts.draws) for name, value in options.items()}

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule | None:
        options = self.chosen(gm.meta.get("options", {}), self._fixed)
        facts = SUBJECTS[self.name.removeprefix(PREFIX)]
        for name in facts.needs:
            if options[name] != facts.draws[name][0] and facts.lacks(name):
                raise Unsupported(
                    f"option {name} is {options[name]!r:.60}, and torch {torch.__version__} has no {facts.lacks(name)}"
                )
        with _quiet(), groups_of(gm), _fake_mode_of(gm):
            return self.rewrite(gm, options)

    @classmethod
    def chosen(cls, told: Mapping[str, Any], fixed: Mapping[str, Any]) -> dict[str, Any]:
        """All options: those that are fixed, else as the program tells them, else the defaults."""
        draws = SUBJECTS[cls.name.removeprefix(PREFIX)].draws
        defaults = {name: values[0] for name, values in draws.items()}
        known = {name: value for name, value in told.items() if name in defaults}
        return {**defaults, **known, **{name: _read(name, value, draws) for name, value in fixed.items()}}

    @classmethod
    def pipeline(cls, options: Mapping[str, Any]) -> Pipeline:
        """How users of torch.compile reach the pass with these options, and how it is called by itself."""
        return Pipeline(unreachable="no setting brings it about")

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> fx.GraphModule | None:
        """Call the pass."""
        raise NotImplementedError


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses torch's warnings about its own code, on import and compilation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _read(name: str, value: Any, draws: Mapping[str, Any]) -> Any:
    """The value of an option that the command line gives as text."""
    if name not in draws:
        raise UsageError(f"there is no option '{name}'", f"its options are {', '.join(draws) or 'none'}")
    for known in draws[name]:
        if value == known or str(value) == str(known):
            return known
    raise UsageError(f"option {name} is {value!r:.60}", f"it can be {', '.join(map(str, draws[name]))}")


@contextlib.contextmanager
def _fake_mode_of(gm: fx.GraphModule) -> Iterator[None]:
    """Let Inductor find the fake mode that the metadata of a graph was made in."""
    from torch._inductor.virtualized import V

    values = (node.meta.get("val") for node in gm.graph.nodes)
    modes = (value.fake_mode for value in values if isinstance(value, FakeTensor))
    with V.set_fake_mode(next(modes, None)):
        yield


__all__ = ["TorchPass"]
