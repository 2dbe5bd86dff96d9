"""A script that shows a finding with torch alone: eager on gloo processes, and beside it what PyTorch makes of the same step.

It ends with 1 where the defect shows, 0 where it does not, and 2 where it cannot tell. Its last line says so in words, the lines
before it what each rank was to give and gave.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from string import Template
from typing import Any, Literal

from tcverify.cases.counterexample import Counterexample
from tcverify.errors import TcverifyError, Unsupported
from tcverify.execution import Lockstep, rounding_noise
from tcverify.program import Program
from tcverify.pytorch.end_to_end.code import RankCode, input_literals, rank_code, text_of
from tcverify.pytorch.end_to_end.differentiated import differentiated_text
from tcverify.pytorch.end_to_end.distributed import IMPORTS, distributed_text
from tcverify.pytorch.end_to_end.pipeline import Code, Pipeline
from tcverify.pytorch.functional_graphs import known_options

#: Seconds after which a collective that nobody joins is given up, and after which all ranks are.
WAITS = 25
SECONDS = 75

#: So many times as far as rounding is expected to take one version, the two may be apart: both round.
NOISE_FACTOR = 4.0

#: Whether a script reaches the pass as users do, or calls it.
Way = Literal["users", "call"]

_TEMPLATE = Template('''\
"""$title

$how
Ends with 1 if the defect shows, 0 if it does not, 2 if that cannot be told.
"""

import datetime
import os
import sys
import tempfile
import time
import traceback
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
$imports

aten, prims, c10d = torch.ops.aten, torch.ops.prims, torch.ops._c10d_functional

WORLD_SIZE = $world_size
GROUPS = $groups  # the ranks of the process groups, by mesh dim
GROUP = {}  # the name that this rank's process group of a mesh dim has
LIMITS = $limits  # how far rounding may take results; all others have to be equal
ERROR = $error  # the exception that is the defect, and the function that raises it, where that is known
ALIAS, HANG = $alias, $hang  # whether the defect is which results share memory, or that nothing is returned
WAITED = "imed out", "Connection closed by peer", "Connection reset by peer"  # no rank leaves before the last has ended
PLACE = []  # where ranks leave files
CALLS = []  # what a rank has called beside ops of torch


$body


$rewritten$settings


STEPS = $steps  # by rank


def inputs(rank):
$inputs


def span(value):
    """The addresses of the first element of a tensor and of the end of the last one."""
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride())) if value.numel() else -1
    return value.data_ptr(), value.data_ptr() + (last + 1) * value.element_size()


def observed(step, rank):
    """What a step returns, leaves in its inputs and calls, and which inputs and outputs overlap each in memory."""
    CALLS.clear()
    given = inputs(rank)
    outputs = [one for one in torch.utils._pytree.tree_leaves(step(*given)) if isinstance(one, torch.Tensor)]
    spans = [span(one) for one in (*given, *outputs)] if ALIAS else []
    memory = [[n for n, one in enumerate(spans) if max(one[0], to[0]) < min(one[1], to[1])] for to in spans]
    found = {f"output {n}": one.detach().clone() for n, one in enumerate(outputs)}
    found.update((f"input {n} after the run", one.detach().clone()) for n, one in enumerate(given))
    return {**found, "calls": list(CALLS), "memory": memory}


def run(rank, folder):
    """Be a rank; leave what it saw in a file."""
    PLACE.append(folder)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD_SIZE,
        timeout=datetime.timedelta(seconds=$waits),
    )
    for name, groups in GROUPS.items():
        for ranks in groups:
            group = dist.new_group(ranks, timeout=datetime.timedelta(seconds=$waits))
            if rank in ranks:
                GROUP[name] = group.group_name
    expected, got, failed = None, None, None
    try:
        expected = observed(STEPS[rank], rank)
        open(f"{folder}/{rank}.eager", "w").close()
$within
            got = observed(rewritten(STEPS[rank], rank), rank)
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".partition("Set TORCHDYNAMO_VERBOSE")[0].split())
        known = ERROR is not None and ERROR[0] in text and (ERROR[1] or "") in traceback.format_exc()
        failed = f"raises {text[:300]}", known
    torch.save((expected, got, failed), f"{folder}/{rank}.part")
    os.replace(f"{folder}/{rank}.part", f"{folder}/{rank}.pt")
    while not all(os.path.exists(f"{folder}/{other}.pt") for other in range(WORLD_SIZE)):
        time.sleep(0.1)  # who leaves breaks the connections of who still waits
    os._exit(0)


def differs(label, expected, got):
    if not isinstance(expected, torch.Tensor):
        return expected != got
    if expected.dtype != got.dtype or expected.shape != got.shape:
        return True
    same = (expected == got) | ((expected != expected) & (got != got))
    if label in LIMITS:
        same |= (expected - got).abs() <= LIMITS[label]
    return not bool(same.all())


def short(value):
    return str(value.tolist() if isinstance(value, torch.Tensor) else value)[:300]


def compared(rank, path):
    """Lines on a rank, and what is wrong with it: nothing, a defect, or why that cannot be told."""
    if not os.path.exists(path):
        if HANG and os.path.exists(path.replace(".pt", ".eager")):
            return [f"rank {rank}: has not returned after $seconds s"], "does not return", ""
        return [f"rank {rank}: no result within $seconds s"], "", f"rank {rank} has no result within $seconds s"
    expected, got, failed = torch.load(path)
    if expected is None:
        return [f"rank {rank}: eager {failed[0]}"], "", f"eager {failed[0]}"
    if failed:
        lines = [f"rank {rank}: expected a result; it {failed[0]}"]
        if failed[1]:
            return lines, f"raises {ERROR[0]}", ""
        waited = any(text in failed[0] for text in WAITED)
        return (lines, "waits forever", "") if waited else (lines, "", f"it {failed[0]}")
    wrong = [label for label in expected if differs(label, expected[label], got.get(label))]
    lines = [f"rank {rank}: {label}: expected {short(expected[label])}, got {short(got.get(label))}" for label in wrong]
    other = {"calls": "other calls", "memory": "other memory is shared"}.get("".join(wrong), "wrong value")
    return (lines, other, "") if wrong else ([f"rank {rank}: as expected"], "", "")


def main():
    with tempfile.TemporaryDirectory() as folder:
        ranks = [mp.get_context("fork").Process(target=run, args=(rank, folder)) for rank in range(WORLD_SIZE)]
        for process in ranks:
            process.start()
        stop = time.monotonic() + $seconds
        for process in ranks:
            process.join(max(0, stop - time.monotonic()))
        died = [rank for rank, process in enumerate(ranks) if process.exitcode not in (0, None)]
        for process in ranks:
            process.kill()
            process.join()
        found = [compared(rank, f"{folder}/{rank}.pt") for rank in range(WORLD_SIZE)]
    print(f"torch {torch.__version__}")
    for lines, _, _ in found:
        print("\\n".join(lines))
    unknown = [why for _, _, why in found if why] + [f"rank {rank} died" for rank in died]
    # A rank that waits may wait for one that has raised.
    wrong = sorted({what for _, what, _ in found if what}, key=lambda what: what == "waits forever")
    if unknown and wrong in ([], ["waits forever"]):
        print(" ".join(unknown[0].split()))
        return 2
    if not wrong:
        print("the same as eager on all ranks")
        return 0
    places = [str(rank) for rank, (_, what, _) in enumerate(found) if what == wrong[0]]
    print(f"{wrong[0]} on rank{'s' * (len(places) > 1)} {', '.join(places)}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
''')

_P2P = """\
# Point-to-point communication as a user registers it: ops with an effect, which compilers may neither drop nor repeat.
library = torch.library.Library("p2p", "DEF")
for schema in ("send(Tensor x, int peer) -> ()", "recv(Tensor like, int peer) -> Tensor",
               "recv_(Tensor(a!) x, int peer) -> ()", "barrier(str group_name) -> ()"):
    library.define(schema)


def send(x, peer):
    CALLS.append(f"send to {peer}")
    dist.send(x.contiguous(), peer)


def recv(like, peer):
    CALLS.append(f"recv from {peer}")
    result = torch.empty_like(like, memory_format=torch.contiguous_format)
    dist.recv(result, peer)
    return result


def recv_(x, peer):
    x.copy_(recv(x, peer))


def barrier(group_name):
    CALLS.append("barrier")
    dist.barrier(dist.distributed_c10d._resolve_process_group(group_name))


for op, fake in ((send, lambda x, peer: None), (recv, lambda like, peer: torch.empty_like(like)),
                 (recv_, lambda x, peer: None), (barrier, lambda group_name: None)):
    name = op.__name__
    library.impl(name, op, "CompositeExplicitAutograd")
    torch.library.register_fake(f"p2p::{name}", fake, lib=library)
    torch.fx.node.has_side_effect(getattr(torch.ops.p2p, name).default)
p2p = torch.ops.p2p"""

_ORDERED = """\
from torch._higher_order_ops import effects

for op in (p2p.send, p2p.recv, p2p.barrier):
    effects._register_effectful_op(op.default, effects._EffectType.ORDERED)"""


def make_script(case: Counterexample, pipeline: Pipeline, way: Way) -> str:
    """Write the script of a case.

    Raises:
        Unsupported: torch alone cannot run the program.
    """
    program = case.program
    _require_sorted_groups(program)
    codes = [rank_code(program, rank) for rank in range(program.world_size)]
    placed = pipeline.placements
    if pipeline.training == "cut":
        functions = [differentiated_text(program, rank, code, pipeline.cut) for rank, code in enumerate(codes)]
        numbers = [f"step_{rank}" for rank in range(len(codes))]
    else:
        functions, numbers = _functions(codes)
    definitions = [*pipeline.definitions, *_operations(codes, ordered=pipeline.ordered), *functions]
    compiled = way == "users" and pipeline.placements is None
    within = ", ".join([*pipeline.given, *(_patches(pipeline) if compiled else [])])
    settings = known_options({**_QUIET, **pipeline.settings}) if compiled else {}
    return _TEMPLATE.substitute(
        title=_documented(case.finding.title),
        how=_documented(_how(pipeline, way)),
        imports="\n".join(_imports(pipeline, way)),
        world_size=program.world_size,
        groups=repr({dim.name: [list(group) for group in dim.groups] for dim in program.mesh.dims}),
        settings=_settings(settings),
        limits=_written(limits_of(program, codes)),
        error=repr(error_of(case, by_function=placed is None)),
        alias=case.finding.kind == "wrong-alias",
        hang=case.finding.kind == "pass-timeout",
        body="\n\n\n".join(definitions),
        steps=f"[{', '.join(numbers if placed is None else [f'on_copies({one})' for one in numbers])}]",
        inputs=_inputs(program),
        rewritten=_rewritten(pipeline, way) if placed is None else distributed_text(program, codes, placed),
        within=f"        with {within}:" if within else "        if True:",
        waits=WAITS,
        seconds=SECONDS,
    )


def _how(pipeline: Pipeline, way: Way) -> str:
    standing = f", with {pipeline.standing_in}" if pipeline.standing_in else ""
    if way == "users":
        return f"Reached through {pipeline.entry}{standing}."
    return f"This calls the pass on the traced step{standing}; {pipeline.entry} has not been seen to show the defect."


def _imports(pipeline: Pipeline, way: Way) -> list[str]:
    if pipeline.placements is not None:
        return list(IMPORTS)
    if way == "call":
        return [
            "from torch._inductor.virtualized import V",
            "from torch._subclasses.fake_tensor import FakeTensor",
            "from torch.fx.experimental.proxy_tensor import make_fx",
        ]
    return ["from torch._inductor import config" + (", config_comms" if pipeline.comms else "")]


def _require_sorted_groups(program: Program) -> None:
    for dim in program.mesh.dims:
        for group in dim.groups:
            if list(group) != sorted(group):
                raise Unsupported(f"'{dim.name}' has a group in the order {list(group)}: dist.new_group sorts ranks")


def _functions(codes: Sequence[RankCode]) -> tuple[list[str], list[str]]:
    """The distinct functions, and which of them each rank calls."""
    texts = [text_of(code, "step") for code in codes]
    distinct = list(dict.fromkeys(texts))
    if len(distinct) == 1:
        return distinct, ["step"] * len(codes)
    names = {text: f"step_{texts.index(text)}" for text in distinct}
    return [text.replace("def step(", f"def {name}(", 1) for text, name in names.items()], [
        names[text] for text in texts
    ]


def _operations(codes: Sequence[RankCode], *, ordered: bool) -> list[str]:
    """Definitions of ops that torch does not have."""
    if not any(line.text.startswith("p2p.") for code in codes for line in code.lines):
        return []
    return [_P2P, _ORDERED] if ordered else [_P2P]


#: Nothing is kept between runs, and nothing is compiled elsewhere.
_QUIET: Mapping[str, Any] = {"fx_graph_cache": False, "compile_threads": 1}


def _settings(settings: Mapping[str, Any]) -> str:
    if not settings:
        return ""
    eager = "; ops call the kernels of eager, so that no C++ is compiled" if "fallback_by_default" in settings else ""
    return f"\n\n\n# Of torch._inductor.config{eager}.\nSETTINGS = {_written(settings)}"


def _patches(pipeline: Pipeline) -> list[str]:
    comms = [f"config_comms.patch({dict(pipeline.comms)!r})"] if pipeline.comms else []
    return ["config.patch(SETTINGS)", *comms]


def limits_of(program: Program, codes: Sequence[RankCode]) -> dict[str, float]:
    """How far outputs may be from those of eager, by their labels in scripts; see `rounding_noise`.

    Raises:
        Unsupported: that cannot be measured.
    """
    try:
        noise = rounding_noise(program, Lockstep().run(program))
    except TcverifyError as error:
        raise Unsupported(f"the limits of rounding cannot be measured: {error.message}") from error
    found: dict[str, float] = {}
    for label, one in noise.items():
        named = re.fullmatch(r"input '(.+)' after the run", label)
        place = codes[0].inputs.index(named[1]) if named is not None and named[1] in codes[0].inputs else None
        if one.largest > 0:
            found[f"input {place} after the run" if place is not None else label] = _number(NOISE_FACTOR * one.largest)
    return found


def _number(value: float) -> float:
    return value if math.isfinite(value) else Code(f"float({str(value)!r})")  # type: ignore[return-value]


def error_of(case: Counterexample, *, by_function: bool) -> tuple[str, str | None] | None:
    """The exception that a finding is about, and which function of torch raises it; None where it is about none.

    Args:
        by_function: that function raises it in scripts, too.
    """
    if case.finding.kind not in ("pass-raised", "rewritten-raises"):
        return None
    found = re.search(r"\braise[ds] (?:InductorError: )?([A-Z]\w+)", case.finding.title)
    frames = torch_frames(case)
    return None if found is None else (found[1], frames[-1][2] if frames and by_function else None)


def torch_frames(case: Counterexample) -> list[tuple[str, str, str]]:
    """File, line and function of the calls in torch that an exception came through, wherever torch is installed."""
    return re.findall(
        r'File "(?:[^"]*[/\\](?:site|dist)-packages[/\\])?(torch/[^"]+)", line (\d+), in (\w+)', case.finding.detail
    )


def _inputs(program: Program) -> str:
    ranks = [f"[{', '.join(values)}]" for values in input_literals(program)]
    if len(set(ranks)) == 1:
        return f"    return {ranks[0]}"
    return "\n".join(["    return [", *(f"        {values}," for values in ranks), "    ][rank]"])


_CALLED = '''\
def rewritten(step, rank):
    """The step as the pass makes it."""

    def called(*given):
        gm = make_fx(step, tracing_mode="fake")(*given)
        values = [node.meta.get("val") for node in gm.graph.nodes]
        with V.set_fake_mode(next((one.fake_mode for one in values if isinstance(one, FakeTensor)), None)):
            change(gm)
        gm.recompile()
        return gm(*given)

    return called'''

_COMPILED = '''\
def rewritten(step, rank):
    """The step as torch.compile makes it."""
    return torch.compile(step, fullgraph=True, dynamic=False$backend)'''

_BESIDE = '''\
def rewritten(step, rank):
    """The step as torch.compile makes it where something beside it is differentiated, so that there is a joint graph."""
    compiled = torch.compile(
        lambda weight, *given: (weight * 2, step(*given)), fullgraph=True, dynamic=False$backend
    )
    return lambda *given: compiled(torch.ones(1, requires_grad=True), *given)[1]'''

_CUT = '''\
def rewritten(step, rank):
    """The step with forward and backward as torch.compile makes them."""
    part = globals()[f"Step_{rank}"]
    compiled = torch.compile(lambda *given: part.apply(*given), fullgraph=True, dynamic=False$backend)
    return lambda *given: step(*given, apply=compiled)'''

_SOME = '''\
def rewritten(step, rank):
    """The step as torch.compile makes it on some ranks. The others wait until those have compiled, not for collectives."""
    if rank $ranks:
        return lambda *given: (compiled_on_all(rank), step(*given))[1]

    def backend(gm, given):
        compiled = torch._dynamo.lookup_backend("$backend")(gm, given)
        compiled_on_all(rank)
        return compiled

    return torch.compile(step, fullgraph=True, dynamic=False, backend=backend)


def compiled_on_all(rank):
    """Return when every rank has come here, or has ended."""
    with open(f"{PLACE[0]}/{rank}.ready", "w"):
        pass
    ends = [(f"{PLACE[0]}/{other}.ready", f"{PLACE[0]}/{other}.pt") for other in range(WORLD_SIZE)]
    while not all(any(map(os.path.exists, either)) for either in ends):
        time.sleep(0.05)'''


_FORMS = {"": _COMPILED, "beside": _BESIDE, "cut": _CUT}


def _rewritten(pipeline: Pipeline, way: Way) -> str:
    if way == "call":
        return "\n".join([*_changing(pipeline), "", "", _CALLED])
    backend = f", backend={pipeline.backend!r}" if pipeline.backend != "inductor" else ""
    text = Template(_FORMS[pipeline.training]).substitute(backend=backend)
    eager = {"all": "", "first": "!= 0", "even": "% 2 == 1", "odd": "% 2 == 0"}[pipeline.compiled_ranks]
    if eager:
        text = Template(_SOME).substitute(ranks=eager, backend=pipeline.backend)
    hooked = any(value == "hook" for value in pipeline.settings.values())
    return "\n".join([*_changing(pipeline), "", "", *_HOOK, "", "", text]) if hooked else text


_HOOK = (
    "def hook(graph):",
    '    """The pass, where Inductor calls those of users."""',
    "    change(graph.owning_module)",
)


def _changing(pipeline: Pipeline) -> list[str]:
    return ["def change(gm):", '    """Call the pass."""', *(f"    {line}" for line in pipeline.call)]


def _written(values: Mapping[str, Any]) -> str:
    """A dict as code, on one line if that is short."""
    if len(repr(dict(values))) <= 90:
        return repr(dict(values))
    return "\n".join(["{", *(f"    {name!r}: {value!r}," for name, value in values.items()), "}"])


def _documented(text: str) -> str:
    """A text that ends no docstring."""
    return " ".join(text.replace("\\", "/").replace('"""', "'''").split())


__all__ = ["SECONDS", "WAITS", "Way", "error_of", "limits_of", "make_script", "torch_frames"]
