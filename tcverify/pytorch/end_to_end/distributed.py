"""A program of whole tensors as code on DTensors: as `tcverify.pytorch.dtensor` runs it, written down."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tcverify.errors import Unsupported
from tcverify.program import Program
from tcverify.pytorch.end_to_end.code import Line, RankCode

#: How a script says placements that options write as letters.
_PLACEMENTS = {"R": "Replicate()", "S": "Shard({})", "P": "Partial({!r})"}

IMPORTS = (
    "from torch.distributed.device_mesh import init_device_mesh",
    "from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor",
)

_REST = '''\
def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def on_copies(step):
    """What a step returns is compared, not what it writes into its inputs: DTensor may copy those."""
    return lambda *given: step(*[one.clone() for one in given])


def rewritten(step, rank):
    """The step on DTensors."""
    mesh = init_device_mesh("cpu", {sizes}, mesh_dim_names={names})
    return on_copies(lambda *given: distributed(mesh, *given))'''


def distributed_text(program: Program, codes: Sequence[RankCode], options: Mapping[str, str]) -> str:
    """The function that computes a program on DTensors, and what calls it.

    Args:
        options: placements of inputs and of results, by name, as `torch:dtensor` reads them.

    Raises:
        Unsupported: it cannot be written so.
    """
    code = codes[0]
    if any(one != code for one in codes):
        raise Unsupported("ranks run different graphs, which is no program of whole tensors")
    names = [dim.name for dim in program.mesh.dims]
    own = dict(zip(code.parameters, code.inputs, strict=True))
    reduced = _reduced(code)
    body = []
    for parameter in code.parameters:
        over = {dim: op for source, dim, op in reduced.values() if source == parameter}
        body += _placed(parameter, options.get(own[parameter]), names, over)
    for line in code.lines:
        if line.name in reduced:
            body.append(f"{line.name} = {reduced[line.name][0]}")
            continue
        if line.text.startswith(("c10d.", "p2p.")):
            raise Unsupported(f"'{line.name}' communicates, which DTensor is to do")
        body.append(str(line))
        if line.name in options:
            body.append(f"{line.name} = {line.name}.redistribute(mesh, {_listed(options[line.name])})")
    sizes = tuple(len(dim.groups[0]) for dim in program.mesh.dims)
    head = f"def distributed(mesh, {', '.join(code.parameters)}):"
    whole = f"    return torch.utils._pytree.tree_map(whole, {code.result})"
    rest = _REST.format(sizes=sizes, names=tuple(names))
    return "\n".join([head, *(f"    {one}" for one in body), whole, "", "", rest])


def _reduced(code: RankCode) -> dict[str, tuple[str, str, str]]:
    """What the program reduces at once, and the waits for that: by name, of which input, over which mesh dim, and how."""
    found: dict[str, tuple[str, str, str]] = {}
    for line in code.lines:
        source = line.reads[0] if line.reads else ""
        if line.text.startswith("c10d.all_reduce.default(") and (source in code.parameters or source in found):
            op, dim = _arguments(line)
            found[line.name] = found[source][0] if source in found else source, dim, op
        elif line.text.startswith("c10d.wait_tensor.default(") and source in found:
            found[line.name] = found[source]
    return found


def _arguments(line: Line) -> tuple[str, str]:
    """The reduction and the mesh dim of an all_reduce."""
    _, op, group = line.text.removesuffix(")").split(", ")
    return op.strip("'"), group.removeprefix("GROUP['").removesuffix("']")


def _placed(name: str, placed: str | None, dims: Sequence[str], over: Mapping[str, str]) -> list[str]:
    """Lines that distribute an input.

    Args:
        over: how its addends are reduced, by mesh dim, where it is partial.
    """
    letters = placed.split(",") if placed else ["R"] * len(dims)
    if len(letters) != len(dims):
        raise Unsupported(f"'{placed}' are placements over {len(letters)} mesh dims, of {len(dims)}")
    plain = ["R" if dim in over else one for dim, one in zip(dims, letters, strict=True)]
    made = f"distribute_tensor({name}, mesh, {_listed(','.join(plain))}, src_data_rank=None)"
    if not over:
        return [f"{name} = {made}"]
    partial = ",".join(f"P{over[dim]}" if dim in over else one for dim, one in zip(dims, plain, strict=True))
    given = f"{made}.to_local(), mesh, {_listed(partial)}, run_check=False"
    return [f"{name} = DTensor.from_local({given}, shape={name}.shape, stride={name}.stride())"]


def _listed(placed: str) -> str:
    """Placements as code; what they are called comes from a file."""
    for one in placed.split(","):
        if re.fullmatch(r"R|S\d|P(sum|avg|max|min|product)", one) is None:
            raise Unsupported(f"'{one}' is no placement")
    return f"[{', '.join(_PLACEMENTS[one[0]].format(_number(one[1:])) for one in placed.split(','))}]"


def _number(text: str) -> int | str:
    return int(text) if text.isdigit() else text


__all__ = ["IMPORTS", "distributed_text"]
