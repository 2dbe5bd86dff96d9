"""From programs whose tensors carry layouts to host programs: the passes that it takes, run one after the other as one pass."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, ClassVar

from torch import fx

from tcverify.errors import UsageError
from tcverify.passes.base import Pass
from tcverify.passes.resharding.contiguous import MakeReshardingContiguous
from tcverify.passes.resharding.deallocation import InsertDeallocations
from tcverify.passes.resharding.lowering import ConvertOpToCommunication
from tcverify.passes.resharding.pipelined import PipelinedMatmul
from tcverify.passes.resharding.stream_loops import StreamParallelType
from tcverify.program import Contract

#: The passes in the order in which they are run.
STAGES = (
    PipelinedMatmul.name,
    StreamParallelType.name,
    MakeReshardingContiguous.name,
    ConvertOpToCommunication.name,
    InsertDeallocations.name,
)


class HostProgram(Pass):
    """Pipelines matmuls, writes out stream-parallel loops, turns resharding into communication, and frees intermediates.

    Before resharding becomes communication, the dims that gain or lose a shard are brought to the front where they must.

    Args:
        number_of_streams: how many worker streams pipelines and loops have.
        form, reduce_form: of pipelines; see `PipelinedMatmul`.
        stages: names of the passes that are run, separated by commas, of `STAGES`; the order is theirs. Inside
            `disabled(NAME)`, a stage does nothing either.
        deallocate: whether intermediates are freed; if not, the last stage is left out.
        dump: directory to which every stage writes the program after it, and so does the whole pass.
        options: those of `Pass`.

    Raises:
        UsageError: the value of an option is invalid.

    Attributes:
        PASSES: what makes the passes, in the order of `STAGES`.
        stages: the passes. `rewrites` counts for each what it rewrote, by its name.
    """

    name = "resharding"
    contract: ClassVar[Contract] = Contract(
        metadata=True, idempotent=True, lowered=True, deallocation=True, inputs="stream0"
    )
    PATTERNS = STAGES
    PASSES: ClassVar[tuple[type[Pass], ...]] = (
        PipelinedMatmul, StreamParallelType, MakeReshardingContiguous, ConvertOpToCommunication, InsertDeallocations,
    )  # fmt: skip

    def __init__(
        self,
        *,
        number_of_streams: int | str = 3,
        form: str = "collective",
        reduce_form: str = "collective",
        stages: str | Iterable[str] = STAGES,
        deallocate: bool | str = True,
        dump: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(dump=dump, **options)
        number = self._whole_number("number_of_streams", number_of_streams, 1)
        chosen = self._choice("stages", stages, STAGES)
        if not self._boolean("deallocate", deallocate):
            chosen -= {InsertDeallocations.name}
        streamed: dict[str, Any] = {"number_of_streams": number}
        given: dict[str, dict[str, Any]] = {
            PipelinedMatmul.name: {**streamed, "form": form, "reduce_form": reduce_form},
            StreamParallelType.name: streamed,
        }
        self.stages = [
            kind(dump=dump, **given.get(name, {}))
            for name, kind in zip(STAGES, self.PASSES, strict=True)
            if name in chosen
        ]
        self.contract = Contract(  # type: ignore[misc] # of this instance
            metadata=True,
            idempotent=True,
            lowered={StreamParallelType.name, ConvertOpToCommunication.name} <= chosen,
            deallocation=InsertDeallocations.name in chosen,
            streams=number,
            inputs="stream0",
        )

    def rewrite(self, graph: fx.Graph) -> Iterable[fx.Node]:
        """Run the stages. See `Pass.rewrite`.

        Raises:
            Unsupported: one of them cannot lower the program; the message names what it is about. What the ones before it
                have rewritten stays: they keep what the program means.
        """
        gm = graph.owning_module
        if gm is None:
            raise UsageError(f"pass '{self.name}' is given a graph that no module owns", "give it a GraphModule")
        for stage in self.stages:
            stage(gm)
            self.rewrites[stage.name] = sum(stage.rewrites.values())
        return []


__all__ = ["STAGES", "HostProgram"]
