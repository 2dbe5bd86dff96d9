"""The result of a diagnosis. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tcverify.execution import Run
from tcverify.explain.relations import Relation


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where the rewritten program first computes something that the original does not explain.

    Attributes:
        node: of the rewritten graph.
        relation: of its value to the original's.
        output: number of the output, if the node's value is explained but is not what the output must be.
        operands: (name, relation) of its operands: to what the original's node of the same name reads there, if it has one.
        raises: whether there is no value, because the node raises on operands that are explained.
        cause: the reason, a phrase to follow a colon; or "".
        rank: whose value it is.
        alone: whether other ranks are correct.
        aspect: of host IR, what is wrong in a word or two ("order of ranks", "root", …), whatever the sizes; or "".
    """

    node: str
    relation: Relation
    output: int | None
    operands: tuple[tuple[str, Relation], ...]
    raises: bool = False
    cause: str = ""
    rank: int | None = None
    alone: bool = False
    aspect: str = ""

    def __str__(self) -> str:
        because = f": {self.cause}" if self.cause else ""
        where = f" on rank {self.rank}" if self.alone and f"on rank {self.rank}" not in self.relation.text else ""
        if self.raises:
            return f"'{self.node}' raises{where}{because}"
        if self.output is not None:
            return f"output {self.output} returns '{self.node}', which is {self.relation.text}{where}{because}"
        if self.relation.kind == "equal" and self.cause:
            return f"'{self.node}' has the value of the original's{where}, but {self.cause}"
        return f"'{self.node}' is {self.relation.text}{where}{because}"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Both versions, run in lockstep, and how their values relate.

    Attributes:
        rank: whose graphs show what is wrong.
        before, after: the runs, every node's value kept; None where there was nothing to run.
        why: why a version did not run.
        relations: by node of the rewritten graph of `rank`.
        first: where the versions diverge, when values differ.
    """

    rank: int
    before: Run | None = None
    after: Run | None = None
    why: str = ""
    relations: Mapping[str, Relation] | None = None
    first: Divergence | None = None
