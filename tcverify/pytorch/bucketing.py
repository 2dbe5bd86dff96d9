"""`torch._inductor.fx_passes.bucketing` and `fsdp`: collectives of one kind become one, over their operands put together.

They are called as `post_grad_passes` calls them: on functional graphs, without second waits where this torch removes those first,
and with a stable topological sort behind them, which they rely on: a bucket stands at one place, its readers anywhere.
"""

from __future__ import annotations

import contextlib
import operator
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import fx

from tcverify.errors import Unsupported
from tcverify.ops import schema_of
from tcverify.pytorch.base import TorchPass
from tcverify.pytorch.end_to_end.pipeline import DEVICE_KNOWN, EAGER_KERNELS, SORT, Pipeline, constant, imported
from tcverify.pytorch.functional_graphs import require_functional

#: The default of `bucket_mode`.
UNSET = "unset"


class Bucketing(TorchPass):
    """A pass that creates buckets.

    Options:
        mode: how a bucket is filled.
        cap_mb: how large it may be, in MiB.
        bucket_mode: `torch._inductor.config.aten_distributed_optimizations.bucket_mode`, read if passes do not get it.
    """

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> None:
        from torch._inductor.pattern_matcher import stable_topological_sort

        require_functional(gm.graph)
        before = set(gm.graph.nodes)
        without_second_waits(gm.graph)
        with _bucket_mode(options.get("bucket_mode", UNSET)):
            self.bucket(gm, options)
        stable_topological_sort(gm.graph)
        without_views_of_own_dtype(gm.graph)
        separate_outputs(gm.graph, before)

    @abstractmethod
    def bucket(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> None:
        """Call the pass itself."""


class OneKind(Bucketing):
    """A pass that makes buckets of one kind of collective."""

    #: Where it is defined, and what it is called there.
    source: ClassVar[tuple[str, str]]

    def bucket(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> None:
        _named(*self.source)(gm, _cap(options), mode=options["mode"])

    @classmethod
    def pipeline(cls, options: Mapping[str, Any]) -> Pipeline:
        module, name = cls.source
        kind = "reduce_scatters" if "reduce_scatter" in name else "all_gathers"
        settings = bucket_settings(kind, options["cap_mb"], options["mode"], fsdp=module == "fsdp")
        return _pipeline(settings, module, name, f"{constant(options['cap_mb'])}, mode={options['mode']!r}")


class BucketAllGather(OneKind):
    """`bucket_all_gather`."""

    name = "torch:bucket_all_gather"
    source = "bucketing", "bucket_all_gather"


class BucketReduceScatter(OneKind):
    """`bucket_reduce_scatter`."""

    name = "torch:bucket_reduce_scatter"
    source = "bucketing", "bucket_reduce_scatter"


class BucketAllReduce(OneKind):
    """`bucket_all_reduce`, which has no modes."""

    name = "torch:bucket_all_reduce"

    def bucket(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> None:
        _named("bucketing", "bucket_all_reduce")(gm, _cap(options))

    @classmethod
    def pipeline(cls, options: Mapping[str, Any]) -> Pipeline:
        cap = options["cap_mb"]
        return _pipeline(bucket_settings("all_reduces", cap), "bucketing", "bucket_all_reduce", str(constant(cap)))


class BucketFsdpAllGather(OneKind):
    """`bucket_fsdp_all_gather`: gathers of parameters."""

    name = "torch:bucket_fsdp_all_gather"
    source = "fsdp", "bucket_fsdp_all_gather"


class BucketFsdpReduceScatter(OneKind):
    """`bucket_fsdp_reduce_scatter`: reductions of gradients."""

    name = "torch:bucket_fsdp_reduce_scatter"
    source = "fsdp", "bucket_fsdp_reduce_scatter"


class DedupReduceScatter(Bucketing):
    """`dedup_fsdp_reduce_scatter`: sums of what has been reduced become reductions of sums."""

    name = "torch:dedup_fsdp_reduce_scatter"

    def bucket(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> None:
        _named("fsdp", "dedup_fsdp_reduce_scatter")(gm)

    @classmethod
    def pipeline(cls, options: Mapping[str, Any]) -> Pipeline:
        return _pipeline({"dedup_reduce_scatters": True}, "fsdp", "dedup_fsdp_reduce_scatter")


class PreBucketFsdp(Bucketing):
    """`pre_bucket_fsdp_collectives`: all collectives of groups that parameters are gathered over."""

    name = "torch:pre_bucket_fsdp_collectives"

    def bucket(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> None:
        mode = None if options["mode"] == UNSET else options["mode"]
        _named("fsdp", "pre_bucket_fsdp_collectives")(gm, mode=mode, bucket_cap_mb=options["cap_mb"])

    @classmethod
    def pipeline(cls, options: Mapping[str, Any]) -> Pipeline:
        """Overlap scheduling begins with it. Told no mode, it calls what makes buckets of FSDP, which reads that itself."""
        mode, configured = (None if options[name] == UNSET else options[name] for name in ("mode", "bucket_mode"))
        if mode is None and configured is not None:
            settings = {
                **bucket_settings("all_gathers", options["cap_mb"], fsdp=True),
                **bucket_settings("reduce_scatters", options["cap_mb"], fsdp=True),
                _MODE: configured,
            }
        else:
            settings = overlap_settings({
                "pre_bucketing_fsdp_collectives": True,
                "pre_bucketing_fsdp_collectives_bucket_cap_mb": options["cap_mb"],
                "bucket_mode": mode,
                "custom_runtime_estimation": constant(1e-3),
            })  # fmt: skip
        found = _pipeline(
            settings, "fsdp", "pre_bucket_fsdp_collectives", f"mode={mode!r}, bucket_cap_mb={options['cap_mb']!r}"
        )
        before = (imported("torch._inductor", "config"), f"config.{_MODE} = {configured!r}") if configured else ()
        return replace(found, definitions=(DEVICE_KNOWN,), call=(*before, *found.call))


class BucketCollectives(Bucketing):
    """All passes of `post_grad_passes` that make buckets, one behind the other, and the sort behind the last.

    Options:
        fsdp: whether gathers are those of parameters alone ("only_fsdp" in Inductor's configuration).
    """

    name = "torch:bucket_collectives"

    def bucket(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> None:
        scattering = options["mode"].replace("_multidtype", "")
        _named("bucketing", "bucket_reduce_scatter")(gm, _cap(options), mode=scattering)
        with contextlib.suppress(AttributeError):  # torch 2.9 leaves all_reduces alone
            _named("bucketing", "bucket_all_reduce")(gm, _cap(options))
        kind = ("fsdp", "bucket_fsdp_all_gather") if options["fsdp"] else ("bucketing", "bucket_all_gather")
        _named(*kind)(gm, _cap(options), mode=options["mode"])

    @classmethod
    def pipeline(cls, options: Mapping[str, Any]) -> Pipeline:
        cap, mode = options["cap_mb"], options["mode"]
        scattering = mode.replace("_multidtype", "")
        module, name = ("fsdp", "bucket_fsdp_all_gather") if options["fsdp"] else ("bucketing", "bucket_all_gather")
        settings = {
            **bucket_settings("reduce_scatters", cap, scattering),
            **bucket_settings("all_reduces", cap),
            **bucket_settings("all_gathers", cap, mode, fsdp=options["fsdp"]),
        }
        found = _pipeline(settings, module, name, f"{constant(cap)}, mode={mode!r}")
        others = ("bucket_reduce_scatter", "bucket_all_reduce")
        calls = (
            f"bucket_reduce_scatter(gm, {constant(cap)}, mode={scattering!r})",
            f"bucket_all_reduce(gm, {constant(cap)})",
        )
        return replace(found, call=(imported(f"{_PASSES}.bucketing", *others), *calls, *found.call))


_PASSES = "torch._inductor.fx_passes"
_MODE = "aten_distributed_optimizations.bucket_mode"


def _pipeline(settings: Mapping[str, Any], module: str, name: str, arguments: str = "") -> Pipeline:
    call = f"{name}(gm, {arguments})" if arguments else f"{name}(gm)"
    return Pipeline(settings={**settings, **EAGER_KERNELS}, call=(imported(f"{_PASSES}.{module}", name), call, *SORT))


def bucket_settings(kind: str, cap_mb: float, mode: str = "", *, fsdp: bool = False) -> dict[str, Any]:
    """Settings of Inductor with which it makes buckets of a kind of collective, such as "all_gathers"."""
    chosen = {f"bucket_{kind}_bucket_mode": mode} if mode else {}
    return {
        f"bucket_{kind}_fx": "only_fsdp" if fsdp else "all",
        f"bucket_{kind}_fx_bucket_size_determinator": constant(cap_mb),
        **chosen,
    }


def overlap_settings(told: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of Inductor with which it schedules overlap; what is None is left to it."""
    settings = {"enable_overlap_scheduling": True, "compute_estimator": "analytical", **told}
    return {f"aten_distributed_optimizations.{name}": value for name, value in settings.items() if value is not None}


def without_views_of_own_dtype(graph: fx.Graph) -> None:
    """Replace a view of a value in the dtype that it has by the value: number domains carry no bits to view."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.view.dtype):
        value = node.args[0]
        if value.meta["val"].dtype == node.args[1]:
            node.replace_all_uses_with(value)
            graph.erase_node(node)


def separate_outputs(graph: fx.Graph, before: set[fx.Node]) -> None:
    """Give outputs that are adjacent in one bucket separate memory: compilers promise nothing about the memory of outputs.

    Args:
        before: the nodes before the pass. Values that share memory because of them keep sharing it.
    """
    output = graph.output_node()
    parts = dict.fromkeys(_viewed(node, lambda one: one not in before) for node in output.all_input_nodes)
    bases = {part: _viewed(part, lambda one: False) for part in parts}
    for part, base in bases.items():
        if part in before or base in before or list(bases.values()).count(base) == 1:
            continue
        with graph.inserting_after(part):
            own = graph.call_function(torch.ops.aten.clone.default, (part,))
        part.replace_all_uses_with(own, delete_user_cb=lambda user: user is output or user in before)


def _viewed(node: fx.Node, until: Callable[[fx.Node], bool]) -> fx.Node:
    """What a view is of, in the end, or the first value on the way of which `until` is true."""
    while not until(node) and node.op == "call_function" and node.all_input_nodes:
        picked = node.target is operator.getitem  # of views or of new tensors: the op that lists them says
        schema = schema_of(node.all_input_nodes[0].target if picked else node.target)
        aliases = schema is None or any(one.alias_info is not None for one in schema.returns)
        if not aliases:
            return node
        out = node.kwargs.get("out")
        node = out if isinstance(out, fx.Node) else node.all_input_nodes[0]
    return node


def without_second_waits(graph: fx.Graph) -> None:
    """Wait once for a value, as `post_grad_passes` does before it calls passes on collectives, where this torch does."""
    from torch._inductor.fx_passes import bucketing

    remove = getattr(bucketing, "deduplicate_wait_tensors", None)  # since torch 2.15, of which post_grad does so
    if remove is not None:
        remove(graph)


@contextlib.contextmanager
def _bucket_mode(mode: str) -> Iterator[None]:
    """Configure Inductor's mode of buckets."""
    if mode == UNSET:
        yield
        return
    from torch._inductor import config

    if not hasattr(config.aten_distributed_optimizations, "bucket_mode"):
        raise Unsupported("this torch does not configure how buckets are filled")
    patched: Any = config.patch({"aten_distributed_optimizations.bucket_mode": mode})
    with patched:
        yield


def _named(module: str, name: str) -> Callable[..., None]:
    from torch._inductor.fx_passes import bucketing, fsdp

    found: Callable[..., None] = getattr({"bucketing": bucketing, "fsdp": fsdp}[module], name)
    return found


def _cap(options: Mapping[str, Any]) -> Callable[[int], float]:
    size: float = options["cap_mb"]
    return lambda _: size


__all__ = [
    "BucketAllGather", "BucketAllReduce", "BucketCollectives", "BucketFsdpAllGather", "BucketFsdpReduceScatter",
    "BucketReduceScatter", "Bucketing", "DedupReduceScatter", "PreBucketFsdp", "bucket_settings", "overlap_settings",
    "separate_outputs", "without_second_waits", "without_views_of_own_dtype",
]  # fmt: skip
