"""The pass that cuts matmuls and the communication of their operands or results into chunks, which overlap on streams."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from torch import fx

from tcverify.errors import UsageError
from tcverify.passes.base import Pass
from tcverify.passes.resharding.pipelined.gather import GATHER_FORMS, Gathering, gather_then_multiply
from tcverify.passes.resharding.pipelined.patterns import GatherMatmul, find_patterns
from tcverify.passes.resharding.pipelined.scatter import SCATTER_FORMS, Scattering, multiply_then_scatter
from tcverify.passes.resharding.pipelined.steps import StepStreams
from tcverify.passes.resharding.writing import HostWriter
from tcverify.program import Contract, rewrite
from tcverify.registry.choices import Word, is_one_of


class PipelinedMatmul(Pass):
    """Pipelines matmuls that have a stream axis with the gathering of A, or with the sum of their partial products.

    A [S, D, M/(S·D), K], sharded on dim 1 of a 1-D mesh and gathered by `set`, is multiplied by an unsharded matrix; or partial
    products, one per rank along a dim of size D, are summed by `reduce` and divided over the same ranks. The stream axis is dim
    0 of the result. Source: nvFuser's matmuls on collective-based and point-to-point pipelines.

    Args:
        number_of_streams: worker streams; chunk i runs on stream i mod that.
        form: of gathering: one all_gather per chunk ("collective"), a "broadcast" from each rank, point-to-point ("p2p"), or
            round a "ring".
        reduce_form: of summing: one reduce_scatter per chunk ("collective"), a rooted "reduce" to each rank, "p2p", or "ring".
        sync_streams: whether each step waits for what is queued on the stream of the one before it. options: those of `Pass`.

    Attributes:
        gathering, scattering: write the steps of a pipeline.

    Raises:
        UsageError: an option cannot have that value.
        Unsupported: by a call, where a stream axis asks for a pipeline, and the operands cannot have one.
    """

    name = "pipelined_matmul"
    contract: ClassVar[Contract] = Contract(metadata=True, idempotent=True, inputs="stream0", streams=3)
    PATTERNS = ("allgather-matmul", "matmul-reduce-scatter")
    gathering: ClassVar[type[Gathering]] = Gathering
    scattering: ClassVar[type[Scattering]] = Scattering

    def __init__(
        self,
        *,
        number_of_streams: int | str = 3,
        form: str = "collective",
        reduce_form: str = "collective",
        sync_streams: bool | str = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.streams = StepStreams(
            self._whole_number("number_of_streams", number_of_streams, 1), self._boolean("sync_streams", sync_streams)
        )
        self.form = self._form("form", form, GATHER_FORMS)
        self.reduce_form = self._form("reduce_form", reduce_form, SCATTER_FORMS)
        self.contract = Contract(metadata=True, idempotent=True, inputs="stream0", streams=self.streams.number)  # type: ignore[misc] # of this instance

    def rewrite(self, graph: fx.Graph) -> Iterable[fx.Node]:
        """Write the pipelined form of every pattern. See `Pass.rewrite`."""
        writer = HostWriter(graph)
        for found in find_patterns(graph):
            gathers = isinstance(found, GatherMatmul)
            if not rewrite("allgather-matmul" if gathers else "matmul-reduce-scatter", found.matmul):
                continue
            if isinstance(found, GatherMatmul):
                with writer.before(found.before):
                    whole, product = gather_then_multiply(writer, found, self.form, self.streams, self.gathering)
                _replace(found.matmul, product)
                _replace(found.gather, whole)
                self.rewrites["allgather-matmul"] += 1
            else:
                with writer.before(found.reduce):
                    total = multiply_then_scatter(writer, found, self.reduce_form, self.streams, self.scattering)
                _replace(found.reduce, total)
                graph.erase_node(found.matmul)
                self.rewrites["matmul-reduce-scatter"] += 1
        return ()

    def _form(self, option: str, given: object, known: Sequence[Word]) -> Word:
        if not is_one_of(given, known):
            raise UsageError(f"option {option} of pass '{self.name}' cannot be {given!r}", f"use {', '.join(known)}")
        return given


def _replace(node: fx.Node, value: fx.Node) -> None:
    node.replace_all_uses_with(value)
    node.graph.erase_node(node)


__all__ = ["PipelinedMatmul"]
