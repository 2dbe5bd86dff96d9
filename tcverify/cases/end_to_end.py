"""What became of a finding when its program ran through PyTorch's public API, as users call it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

#: shown: the program goes wrong there, too; right: it computes what eager computes; unreachable: nothing of the public API brings
#: the pass to this program here; failed: that could not be told.
EndToEndState = Literal["shown", "right", "unreachable", "failed"]

_SENTENCES = {
    "shown": "also in {entry}: {detail}",
    "right": "{entry} gives the right result under these options",
    "unreachable": "could not be reached in {entry}: {detail}",
    "failed": "{entry} could not be tried: {detail}",
}


@dataclass(frozen=True, slots=True)
class EndToEnd:
    """How a trial of a case in the public API ended.

    Attributes:
        entry: what was called, such as "torch.compile".
        detail: what goes wrong, on which ranks; or why nothing is known.
        lines: what each rank was to give, and gave.
        with_defaults: whether the same goes wrong without the settings that switch the pass on.
    """

    state: EndToEndState
    entry: str
    detail: str = ""
    lines: tuple[str, ...] = ()
    with_defaults: bool = False

    def __str__(self) -> str:
        said = _SENTENCES[self.state].format(entry=self.entry, detail=self.detail)
        return f"{said}, with default settings too" if self.with_defaults else said


def encode_end_to_end(told: EndToEnd) -> dict[str, Any]:
    """Write it as JSON-able data."""
    return {**asdict(told), "lines": list(told.lines)}


def decode_end_to_end(data: Any) -> EndToEnd:
    """Read it from JSON-able data.

    Raises:
        KeyError, TypeError: it is malformed.
    """
    texts = [data["state"], data["entry"], data["detail"], *data["lines"]]
    for one in texts:
        if not isinstance(one, str):
            raise TypeError(f"{one!r:.60} is not a text")
    if data["state"] not in get_args(EndToEndState):
        raise TypeError(f"{data['state']!r:.60} is not the end of a trial: {', '.join(get_args(EndToEndState))}")
    with_defaults = data.get("with_defaults", False)
    if not isinstance(with_defaults, bool):
        raise TypeError(f"{with_defaults!r:.60} is neither true nor false")
    return EndToEnd(data["state"], data["entry"], data["detail"], tuple(data["lines"]), with_defaults)


__all__ = ["EndToEnd", "decode_end_to_end", "encode_end_to_end"]
