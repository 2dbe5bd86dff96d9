"""Reads programs that torch.export made."""

from __future__ import annotations

import torch
from torch.utils import _pytree as pytree

from tcverify.capturing.normalize import InputFacts, plain
from tcverify.capturing.record import Captured, InputRole

_ROLES: dict[str, InputRole] = {
    "PARAMETER": "parameter",
    "BUFFER": "buffer",
    "CONSTANT_TENSOR": "constant",
    "USER_INPUT": "input",
}


def capture_exported(exported: torch.export.ExportedProgram) -> Captured:
    """What an exported program says about the rank that exported it."""
    state = {**exported.state_dict, **exported.constants}
    examples = iter(pytree.tree_leaves(exported.example_inputs) if exported.example_inputs is not None else ())
    facts = {}
    for spec in exported.graph_signature.input_specs:
        role = _ROLES.get(spec.kind.name, "input")
        value = next(examples, None) if role == "input" else state.get(spec.target or "")
        facts[spec.arg.name] = InputFacts(role, value=value if isinstance(value, torch.Tensor) else None)
    return plain(exported.graph_module, None, facts)


__all__ = ["capture_exported"]
