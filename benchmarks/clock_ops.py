"""Measured times of single ops against the cost model, for `gpu_clocks.py`."""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from clock_device import Clock, Lanes
from clock_profile import random_values
from clock_tables import markdown, median, micro, number, problems, reason, spearman, within
from torch import fx
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from tcverify.cost import DeviceProfile, node_cost, takes_no_time
from tcverify.cost.flops import FLOPS_PER_ELEMENT, SPARSE, WORK
from tcverify.ops import lookup, qualified_name
from tcverify.ops.leaves import leaves
from tcverify.passes import Multistream
from tcverify.passes.multistream.graph import NotLowered
from tcverify.program import Mesh, Program
from tcverify.strategies import DECODERS, decode
from tcverify.strategies.transformer.experts import decode_experts
from tcverify.strategies.transformer.overlap import decode_overlap
from tcverify.strategies.wild.programs import decode_wild

#: Decoders that write programs of any size.
SIZED: Mapping[str, Callable[[Mesh, bytes, int], Program]] = {
    "structured": decode,
    "overlap": decode_overlap,
    "wild": decode_wild,
    "moe": decode_experts,
}

#: A world of one rank.
ALONE = Mesh.grid({"tp": 1})

#: The kind of ops that are one kernel in the model, and here what their meaning is written in.
PARTS = "fused op, run here in parts"

#: Most bytes of all copies of what an op reads.
MOST_BYTES = 6 << 30
#: Ops that are predicted to take longer are left out.
MOST_S = 3e-3
#: Most copies of the operands of an op: what is small stays in the cache.
MOST_SETS = 48


def drawn(strategy: str, seed: int, times: int) -> Program:
    """The program of a number, of activations that are so many times as large as those that campaigns draw."""
    return SIZED[strategy](ALONE, random.Random(seed).randbytes(DECODERS[strategy].width), times)


@dataclass
class TimedOp:
    """One call.

    Attributes:
        kind: see `kind_of`.
        what: op and operands in words.
        predicted: seconds by the name of the profile.
        measured: seconds.
    """

    node: fx.Node
    name: str
    kind: str
    what: str
    predicted: dict[str, float]
    measured: float = math.nan


@dataclass
class OpTimes:
    """The outcome.

    Attributes:
        timed: those that were measured.
        found: how many different calls there are.
        refused: calls that do not run here, by what was raised.
        wrong: calls whose replay returned something else than a plain run.
    """

    timed: list[TimedOp] = field(default_factory=list)
    found: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def kind_of(node: fx.Node, name: str) -> str:
    """What sort of op it is, as its time depends on it."""
    base = name.split(".")[0]
    short = base.rpartition("::")[2]
    tags = {tag.name for tag in getattr(node.target, "tags", ())}
    if not base.startswith("aten::"):
        return PARTS
    if "attention" in base:
        return "attention"
    if base in WORK:
        return "matrix product"
    if base in SPARSE or FLOPS_PER_ELEMENT.get(short) == 0:
        return "copy"
    if "norm" in short or "softmax" in short or "reduction" in tags:
        return "reduction"
    results = [math.prod(spec.shape) for spec in leaves(node.meta.get("val"), torch.Tensor)]
    operands = [math.prod(spec.shape) for n in node.all_input_nodes for spec in leaves(n.meta.get("val"), torch.Tensor)]
    if "pointwise" not in tags and operands and results and max(results) < max(operands):
        return "reduction"
    return "elementwise" if "pointwise" in tags else "other"


# ---------------------------------------------------------------------------------------------------------- the calls


def of_programs(times: Sequence[int], seeds: Iterator[int]) -> Iterator[fx.Node]:
    """The work of drawn programs, without end."""
    scheduler = Multistream(device="h100-sxm")
    while True:
        for strategy in SIZED:
            for factor in times:
                gm = drawn(strategy, next(seeds), factor).graph_module(0)
                for node in gm.graph.nodes:
                    node.meta.pop("cost_s", None)
                try:
                    work = scheduler.read(gm.graph).work
                except NotLowered:
                    continue
                yield from (op.node for op in work if op.resources == ("compute",))


def of_models(place: torch.device, tiny: bool) -> Iterator[fx.Node]:
    """Forward and backward of a layer of a Llama, with attention of torch's own kernel, and with its parts."""
    import production_models as models
    import torch.nn.functional as F
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    class Kernel(models.Attention):
        """Attention by one kernel."""

        def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            batch, length = x.shape[:2]
            q, k, v = (p(x).view(batch, length, -1, self.head).transpose(1, 2) for p in (self.q, self.k, self.v))
            k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=False)
            return self.o(mixed.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]

    large = [
        models.Sizes(), models.Sizes(length=4096),
        models.Sizes(width=2048, heads=16, kv_heads=16, inner=8192, length=1024, batch=4),
    ]  # fmt: skip
    for sizes in [models.Sizes(width=64, heads=4, kv_heads=2, inner=128, length=16)] if tiny else large:
        for attention in (models.Attention, Kernel):
            with FakeTensorMode(allow_non_fake_inputs=True), torch.device(place), _default_dtype(torch.bfloat16):
                block = models.Block(sizes, attention(sizes), models.FeedForward(sizes.width, sizes.inner))
                x = torch.empty(sizes.batch, sizes.length, sizes.width, requires_grad=True)
                tables = [torch.empty(sizes.length, sizes.width // sizes.heads) for _ in range(2)]

                def step(x: torch.Tensor, *tables: torch.Tensor, block: Any = block) -> Any:
                    made = block(x, *tables)
                    return torch.autograd.grad(made, [x, *block.parameters()], made)

                gm = make_fx(step)(x, *tables)
            for node in gm.graph.nodes:
                if node.op == "call_function" and not takes_no_time(node) and not _is_view(node):
                    yield node


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _is_view(node: fx.Node) -> bool:
    """Whether a call returns its operand, in whole or in part, or no tensor."""
    results = leaves(node.meta.get("val"), torch.Tensor)
    schema = getattr(node.target, "_schema", None)
    views = schema is None or any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return not results or views or "_unsafe_view" in str(node.target) or node.target is torch.ops.aten.detach.default


def collected(
    nodes: Iterator[fx.Node], profiles: Mapping[str, DeviceProfile], most: int, deadline: float
) -> list[TimedOp]:
    """The different calls among nodes: those whose op and operands differ."""
    known: dict[Any, TimedOp] = {}
    for node in nodes:
        if len(known) >= most or time.monotonic() > deadline:
            break
        name = qualified_name(node.target)
        key = (name, str(map_aggregate(node.args, _shown)), str(map_aggregate(node.kwargs, _shown)))
        if key not in known:
            predicted = {label: node_cost(node, profile) or math.nan for label, profile in profiles.items()}
            if not min(predicted.values()) < MOST_S:
                continue
            shapes = ", ".join(_shown(n) for n in node.all_input_nodes)
            known[key] = TimedOp(node, name, kind_of(node, name), f"{name}({shapes})", predicted)
    return list(known.values())


def _shown(leaf: Any) -> Any:
    if not isinstance(leaf, fx.Node):
        return leaf
    specs = leaves(leaf.meta.get("val"), torch.Tensor)
    return " ".join(f"{str(spec.dtype).removeprefix('torch.')}{list(spec.shape)}" for spec in specs)


# ------------------------------------------------------------------------------------------------------------ running


class Call:
    """A call on a device: its operands, made of random values, and how it is run."""

    def __init__(self, node: fx.Node, place: torch.device) -> None:
        run: Any = node.target
        if not isinstance(run, torch._ops.OpOverload) or run.namespace != "aten":  # whose kernels are the device's own
            op = lookup(run)
            run = op.native or op.run
            if run is None:
                raise NotImplementedError(f"{op.name} has no meaning")
        self._run, self._node, self._place = run, node, place
        high = [
            min(spec.shape, default=1) for n in node.all_input_nodes for spec in leaves(n.meta["val"], torch.Tensor)
        ]
        self.base = {n: self._value(n.meta["val"], max(1, high[0])) for n in node.all_input_nodes}
        self.bytes = sum(t.numel() * t.element_size() for t in _all_tensors(self.base))
        schema = getattr(node.target, "_schema", None)
        returns = () if schema is None else schema.returns
        # the state of a random generator, of which a replay has its own
        self._states = {at for at, result in enumerate(returns) if str(result.name).startswith(("philox", "rng_state"))}
        self._placed = schema is not None and any(argument.name == "device" for argument in schema.arguments)

    def _value(self, val: Any, high: int) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda spec: self._tensor(spec, high), val)

    def _tensor(self, spec: torch.Tensor, high: int) -> torch.Tensor:
        dense = random_values(tuple(spec.shape), spec.dtype, self._place, high)
        if spec.stride() == dense.stride() or 0 in spec.stride():
            return dense
        made = torch.empty_strided(spec.shape, spec.stride(), dtype=spec.dtype, device=self._place)
        return made.copy_(dense)

    def operands(self) -> dict[fx.Node, Any]:
        """A copy of the operands."""
        return {n: pytree.tree_map_only(torch.Tensor, _copied, value) for n, value in self.base.items()}

    def __call__(self, operands: Mapping[fx.Node, Any]) -> list[torch.Tensor]:
        def known(leaf: Any) -> Any:
            if isinstance(leaf, torch.device):
                return self._place
            return operands[leaf] if isinstance(leaf, fx.Node) else leaf

        kwargs = dict(map_aggregate(self._node.kwargs, known))
        if self._placed:
            kwargs["device"] = self._place
        results = self._run(*map_aggregate(self._node.args, known), **kwargs)
        if self._states:
            results = [value for at, value in enumerate(results) if at not in self._states]
        return leaves(results, torch.Tensor)


def _all_tensors(operands: Mapping[fx.Node, Any]) -> list[torch.Tensor]:
    return leaves(list(operands.values()), torch.Tensor)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor).copy_(tensor)


def time_op(clock: Clock, node: fx.Node, rounds: int) -> tuple[float, bool]:
    """The seconds that a call takes, and whether its replay returned what a plain run returns.

    Each copy of the operands is used once per replay, and all copies together are larger than the cache where that is possible.
    """
    with torch.no_grad(), torch.device(clock.place):
        call = Call(node, clock.place)
        if call.bytes > MOST_BYTES // 2:
            raise MemoryError("operands too large for this benchmark")
        plain = call(call.operands())
        with clock.without_waits():
            call(call.operands())
        own = max(1, call.bytes + sum(t.numel() * t.element_size() for t in plain))
        count = max(2, min(MOST_SETS, -(-3 * clock.cache_bytes // own), MOST_BYTES // own))
        sets = [call.operands() for _ in range(count)]
        results: list[list[torch.Tensor]] = []

        def work(lanes: Lanes) -> Any:
            results[:] = [call(own) for own in sets]
            return results

        replay = clock.capture(work)
        operands = [_all_tensors(one) for one in sets]
        written = {tensor.untyped_storage().data_ptr() for one in operands for tensor in one}
        for tensor in (t for one in results for t in one):
            if tensor.untyped_storage().data_ptr() not in written:
                tensor.zero_()  # what is not computed by the replay stays so
        for one in operands:
            for tensor, base in zip(one, _all_tensors(call.base), strict=True):
                tensor.copy_(base)
        clock.finish()
        replay.run()
        clock.finish()
        same = all(close(a, b) for one in (results[0], results[-1]) for a, b in zip(one, plain, strict=True))
        clock.seconds([replay], 1)
        (times,) = clock.seconds([replay], rounds)
        return median(times) / count, same


def close(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two results of the same kernels are equal, up to the order in which atomic additions come."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if first.dtype.is_floating_point and first.dtype.itemsize == 1:
        first, second = first.float(), second.float()
    if torch.equal(first, second):
        return True
    a, b = (t.to(torch.float64 if not t.is_complex() else torch.complex128) for t in (first, second))
    finite = torch.isfinite(a) & torch.isfinite(b)
    if not torch.equal(torch.isfinite(a), torch.isfinite(b)) or not bool(finite.any()):
        return bool(torch.equal(torch.isnan(a), torch.isnan(b)))
    scale = b[finite].abs().max()
    return bool((a[finite] - b[finite]).abs().max() <= 0.02 * scale)


def measure_ops(clock: Clock, profiles: Mapping[str, DeviceProfile], tiny: bool, most: int, deadline: float) -> OpTimes:
    """Measure as many different ops as there is time for."""
    begun = time.monotonic()
    collecting = begun + 0.25 * (deadline - begun)
    found = OpTimes()
    seeds = iter(range(10_000_000))
    calls = collected(of_programs((2, 4) if tiny else (16, 64, 128, 256, 512), seeds), profiles, most, collecting)
    try:
        calls += collected(of_models(clock.place, tiny), profiles, most, deadline)
    except Exception as error:  # noqa: BLE001 - tracing models is torch's; the drawn programs remain
        found.refused[f"layers of models, which could not be traced: {reason(error)}"] += 1
    found.found = len(calls)
    random.Random(0).shuffle(calls)
    for call in calls:
        if time.monotonic() > deadline:
            break
        try:
            call.measured, same = time_op(clock, call.node, 3 if tiny else 5)
        except Exception as error:  # noqa: BLE001 - ops may refuse dtypes, sizes or capture with any error
            found.refused[f"{call.name}: {reason(error)}"] += 1
            continue
        found.timed.append(call)
        if not same:
            found.wrong.append(call.what)
    return found


# ------------------------------------------------------------------------------------------------------------- tables


def ops_section(found: OpTimes, labels: Sequence[str]) -> str:
    """The Markdown of the section."""
    header = ["kind of op", "ops"]
    for label in labels:
        header += [f"measured / {label}, median", "within a factor of 2", "rank correlation"]
    kinds = sorted({op.kind for op in found.timed})
    rows = []
    for kind in [*kinds, None]:
        own = [op for op in found.timed if kind in (None, op.kind)]
        row: list[object] = [kind or "all", len(own)]
        for label in labels:
            ratios = [op.measured / op.predicted[label] for op in own]
            both = [op.predicted[label] for op in own], [op.measured for op in own]
            row += [number(median(ratios)), number(within(ratios, 2), ".0%"), number(spearman(*both))]
        rows.append(row)
    last = labels[-1]
    kernels = [op for op in found.timed if op.kind != PARTS]
    worst = sorted(kernels, key=lambda op: -abs(math.log(op.measured / op.predicted[last])))
    shown: list[TimedOp] = []
    for op in worst:
        if len(shown) < 10 and sum(other.name == op.name for other in shown) < 2:
            shown.append(op)
    lines = [
        f"{len(found.timed)} of {found.found} different ops were measured; collectives are left out: one rank alone has none."
    ]
    lines.append(markdown(header, rows))
    lines.append(f"The ten ops farthest from {last}, at most two of a name, fused ops aside:")
    lines.append(
        markdown(
            ("op", "kind", "measured µs", "predicted µs", "ratio"),
            [
                (op.what[:150], op.kind, micro(op.measured), micro(op.predicted[last]), number(op.measured / op.predicted[last]))
                for op in shown
            ],
        )
    )  # fmt: skip
    lines += problems(found.refused, "ops", found.wrong, "Replays that returned something else than a plain run:")
    return "\n".join(lines)
