"""Pipelines by name: references of passes joined by "+", and the options of each stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tcverify.errors import PassLoadError

#: Separates the references of a pipeline's stages.
SEPARATOR = "+"


def stage_targets(target: str) -> list[str]:
    """Split "module:a+module:b" into its stages; a "+" in a path belongs to the path.

    Raises:
        PassLoadError: a stage is empty.
    """
    return split_stages(target, lambda piece: ":" in piece)


def split_stages(text: str, complete: Callable[[str], bool]) -> list[str]:
    """Split a pipeline at "+", except where the piece before is not `complete`: then the "+" belongs to it.

    Raises:
        PassLoadError: a stage is empty.
    """
    found: list[str] = []
    piece = ""
    for part in text.split(SEPARATOR):
        piece = f"{piece}{SEPARATOR}{part}" if piece else part
        if not piece:
            raise PassLoadError(f"'{text}' has an empty stage", "write a pipeline as first+second")
        if complete(piece):
            found.append(piece)
            piece = ""
    return [*found, piece] if piece else found


def stage_options(stages: Sequence[str], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Assign options to stages: "multistream.device" is the option "device" of stage "multistream", "2.device" of the second.

    Args:
        stages: names of the stages, in order.

    Raises:
        PassLoadError: an option does not name its stage.
    """
    if len(stages) == 1:
        return [dict(options)]
    found: list[dict[str, Any]] = [{} for _ in stages]
    for key, value in options.items():
        where, _, option = key.partition(".")
        places = [i for i, name in enumerate(stages) if where in (name, str(i + 1))]
        if not option or len(places) != 1:
            why = "matches several stages" if len(places) > 1 else "names no stage of the pipeline"
            if places and not option:
                why = "names no option of its stage"
            last = f"{len(stages)}.NAME" if len(places) > 1 else f"{stages[-1]}.NAME or {len(stages)}.NAME"
            raise PassLoadError(f"option '{key}' {why}", f"write {last}")
        found[places[0]][option] = value
    return found


__all__ = ["SEPARATOR", "split_stages", "stage_options", "stage_targets"]
