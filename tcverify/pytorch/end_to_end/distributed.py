"""A program of whole tensors as code on DTensors: as `tcverify.pytorch.dtensor` runs it, written down."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from tcverify.errors import Unsupported
from tcverify.program import Program
from tcverify.pytorch.end_to_end.code import Line, RankCode

#: How a script says placements that options write as letters.
_PLACEMENTS = {"R": "Replicate()", "S": "Shard({})", "P": "Partial({!r})", "F": "_StridedShard({}, split_factor={})"}

IMPORTS = (
    "from torch.distributed.device_mesh import init_device_mesh",
    "from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor",
    "from torch.distributed.tensor.placement_types import _StridedShard",
)

_REST = '''\
def placed(value, mesh, placements):
    """A tensor that all ranks have, in a layout. FSDP shards (strided) what the other dims of the mesh have sharded."""
    first = [Replicate() if isinstance(one, _StridedShard) else one for one in placements]
    made = distribute_tensor(value, mesh, first, src_data_rank=None)
    part = made.to_local()
    for n in reversed([n for n, one in enumerate(placements) if isinstance(one, _StridedShard)]):
        parts, place = part.chunk(mesh.size(n), placements[n].dim), mesh.get_coordinate()[n]
        part = parts[place] if place < len(parts) else part.narrow(placements[n].dim, 0, 0)
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=value.shape, stride=value.stride())


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
    sizes = tuple(len(dim.groups[0]) for dim in program.mesh.dims)
    own = dict(zip(code.parameters, code.inputs, strict=True))
    reduced = _reduced(code)
    body = []
    for parameter in code.parameters:
        over = {dim: op for source, dim, op in reduced.values() if source == parameter}
        body += _placed(parameter, options.get(own[parameter]), names, sizes, over)
    for line in code.lines:
        if line.name in reduced:
            body.append(f"{line.name} = {reduced[line.name][0]}")
            continue
        if line.text.startswith(("c10d.", "p2p.")):
            raise Unsupported(f"'{line.name}' communicates, which DTensor is to do")
        body.append(str(line))
        if line.name in options:
            body.append(f"{line.name} = {line.name}.redistribute(mesh, {_listed(options[line.name], sizes)})")
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


def _placed(
    name: str, placed: str | None, dims: Sequence[str], sizes: Sequence[int], over: Mapping[str, str]
) -> list[str]:
    """Lines that distribute an input.

    Args:
        over: how its addends are reduced, by mesh dim, where it is partial.
    """
    letters = placed.split(",") if placed else ["R"] * len(dims)
    if len(letters) != len(dims):
        raise Unsupported(f"'{placed}' are placements over {len(letters)} mesh dims, of {len(dims)}")
    plain = ["R" if dim in over else one for dim, one in zip(dims, letters, strict=True)]
    made = f"placed({name}, mesh, {_listed(','.join(plain), sizes)})"
    if not over:
        return [f"{name} = {made}"]
    partial = ",".join(f"P{over[dim]}" if dim in over else one for dim, one in zip(dims, plain, strict=True))
    given = f"{made}.to_local(), mesh, {_listed(partial, sizes)}, run_check=False"
    return [f"{name} = DTensor.from_local({given}, shape={name}.shape, stride={name}.stride())"]


def _listed(placed: str, sizes: Sequence[int]) -> str:
    """Placements as code; what they are called comes from a file."""
    letters = placed.split(",")
    for one in letters:
        if re.fullmatch(r"R|[SF]\d|P(sum|avg|max|min|product)", one) is None:
            raise Unsupported(f"'{one}' is no placement")
    return f"[{', '.join(_written(one, number, letters, sizes) for number, one in enumerate(letters))}]"


def _written(one: str, number: int, letters: Sequence[str], sizes: Sequence[int]) -> str:
    """A placement over one dim of the mesh. FSDP shards what the dims behind it have sharded before."""
    kind, rest = one[0], one[1:]
    factor = math.prod(
        size
        for other, size in zip(letters[number + 1 :], sizes[number + 1 :], strict=True)
        if other in (f"S{rest}", f"F{rest}")
    )
    kind = "S" if kind == "F" and factor == 1 else kind
    return _PLACEMENTS[kind].format(int(rest) if rest.isdigit() else rest, factor)


__all__ = ["IMPORTS", "distributed_text"]
