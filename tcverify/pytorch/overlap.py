"""`torch._inductor.fx_passes.overlap_scheduling` and `overlap_manual_scheduling`: overlap of compute and communication.

They are called as `post_grad_passes` calls them: on functional graphs, without second waits where this torch removes those first.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from tcverify.pytorch.base import TorchPass
from tcverify.pytorch.bucketing import overlap_settings, separate_outputs, without_second_waits
from tcverify.pytorch.compat import device_known, filter_known_options, patch_attributes
from tcverify.pytorch.control_deps import plain_order
from tcverify.pytorch.end_to_end.pipeline import DEVICE_KNOWN, EAGER_KERNELS, Code, Pipeline, imported
from tcverify.pytorch.functional_graphs import require_functional

#: Estimates the time of a call, in milliseconds; the second argument is a size in bytes that counts instead of its own.
Estimate = Callable[[fx.Node, "int | None"], "float | None"]


class ScheduleOverlapBucketing(TorchPass):
    """`schedule_overlap_bucketing`.

    Options:
        estimates: which times it works with. "place": some that follow from places in the graph, so that ranks with the same
            graph estimate alike. "costs": `meta["cost_s"]` where a call has it. "sizes": from the shapes of this rank. "torch":
            from its own model, for an A100. Products of matrices are by place where this torch makes the ranks agree on them.
        The others are arguments of the pass.
    """

    name = "torch:schedule_overlap_bucketing"

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> None:
        from torch._inductor.fx_passes import overlap_scheduling as module

        require_functional(gm.graph)
        before = set(gm.graph.nodes)
        without_second_waits(gm.graph)
        pass_ = module.schedule_overlap_bucketing
        told = {name: value for name, value in options.items() if name != "estimates"}
        analytic = filter_known_options(pass_, {"compute_estimator": "analytical"})
        with undisturbed(module):
            pass_(
                gm, **filter_known_options(pass_, told), **analytic,
                custom_runtime_estimation=_estimate(gm, options["estimates"], module.is_compute_node, bool(analytic)),
            )  # fmt: skip
        plain_order(gm)
        separate_outputs(gm.graph, before)
        gm.recompile()

    @classmethod
    def pipeline(cls, options: Mapping[str, Any]) -> Pipeline:
        """Ranks are to estimate alike, so that times are of places where torch would ask for those of a GPU."""
        from torch._inductor.fx_passes.overlap_scheduling import schedule_overlap_bucketing

        told = {name: value for name, value in options.items() if name != "estimates"}
        estimated = "by_size" if options["estimates"] == "sizes" else "by_place"
        arguments = filter_known_options(schedule_overlap_bucketing, {**told, "compute_estimator": "analytical"})
        return Pipeline(
            settings={
                **overlap_settings({**told, "custom_runtime_estimation": Code(estimated)}),
                **EAGER_KERNELS,
            },
            definitions=(DEVICE_KNOWN, _ESTIMATES[estimated]),
            call=(
                imported("torch._inductor.fx_passes.overlap_scheduling", "schedule_overlap_bucketing"),
                f"schedule_overlap_bucketing(gm, custom_runtime_estimation={estimated}, **{arguments!r})",
            ),
        )


#: As in `_estimate`.
_ESTIMATES = {
    "by_place": """\
def by_place(node, size=None):
    \"\"\"A time in milliseconds that follows from the place in the graph.\"\"\"
    return (list(node.graph.nodes).index(node) * 37 % 11 + 1) * 1e-3""",
    "by_size": """\
def by_size(node, size=None):
    \"\"\"A time in milliseconds that follows from the sizes of results.\"\"\"
    values = [one for one in torch.utils._pytree.tree_leaves(node.meta.get("val")) if isinstance(one, torch.Tensor)]
    return 1e-3 + (size or sum(one.numel() * one.element_size() for one in values)) * 1e-5""",
}


class ManualOverlapBucketing(TorchPass):
    """`manual_overlap_bucketing`.

    Options:
        modules: number of modules into which the graph is divided.
        plan: how they are bucketed: "each" separately, in "pairs", or all in "one".
        insert_overlap_deps, bucket_mode: arguments of the pass.
    """

    name = "torch:manual_overlap_bucketing"

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> None:
        from torch._inductor.fx_passes import overlap_manual_scheduling as manual
        from torch._inductor.fx_passes import overlap_scheduling as module

        require_functional(gm.graph)
        before = set(gm.graph.nodes)
        without_second_waits(gm.graph)
        pass_ = manual.manual_overlap_bucketing
        modules = [f"m{number}" for number in range(options["modules"])]
        calls = [node for node in gm.graph.nodes if node.op == "call_function"]
        owner = {node: modules[place * len(modules) // len(calls)] for place, node in enumerate(calls)}
        with undisturbed(module):
            pass_(
                gm, plan_of(modules, options["plan"]),
                module_stack_fn=lambda node: [(owner[node], torch.nn.Module)] if node in owner else [],
                **filter_known_options(pass_, {name: options[name] for name in ("insert_overlap_deps", "bucket_mode")}),
            )  # fmt: skip
        plain_order(gm)
        separate_outputs(gm.graph, before)
        gm.recompile()

    @classmethod
    def pipeline(cls, options: Mapping[str, Any]) -> Pipeline:
        from torch._inductor.fx_passes.overlap_manual_scheduling import manual_overlap_bucketing

        modules = [f"m{number}" for number in range(options["modules"])]
        told = {name: options[name] for name in ("insert_overlap_deps", "bucket_mode")}
        arguments = filter_known_options(manual_overlap_bucketing, told)
        return Pipeline(
            entry="torch.compile with post_grad_custom_post_pass",
            settings={"post_grad_custom_post_pass": Code("hook"), **EAGER_KERNELS},
            definitions=(DEVICE_KNOWN,),
            call=(
                imported("torch._inductor.fx_passes.overlap_manual_scheduling", "manual_overlap_bucketing"),
                f"modules = {modules!r}  # one after the other",
                'calls = [node for node in gm.graph.nodes if node.op == "call_function"]',
                "owner = {node: modules[place * len(modules) // len(calls)] for place, node in enumerate(calls)}",
                "manual_overlap_bucketing(",
                f"    gm, {plan_of(modules, options['plan'])!r}, **{arguments!r},",
                "    module_stack_fn=lambda node: [(owner[node], torch.nn.Module)] if node in owner else [],",
                ")",
            ),
        )


def plan_of(modules: list[str], plan: str) -> list[list[str] | str]:
    """The buckets of modules that a plan makes."""
    if plan == "one":
        return [list(modules)]
    if plan == "pairs":
        return [modules[first : first + 2] for first in range(0, len(modules), 2)]
    return list(modules)


@contextlib.contextmanager
def undisturbed(module: Any) -> Iterator[None]:
    """Reset what earlier programs left in estimates, answer on behalf of other ranks when they are queried, and count memory.

    Only times of matrix products are queried, which are equal on all ranks here. Budgets of memory leave the CPU out otherwise.
    """
    from torch._inductor.fx_passes import memory_estimator

    def ask(answers: list[Any], mine: Any, *_: Any, **__: Any) -> None:
        answers[:] = [mine] * len(answers)

    with (
        device_known(),
        patch_attributes(module, get_cached_node_time=lambda _: None, set_cached_node_time=lambda *_, **__: None),
        patch_attributes(
            module, estimate_runtime_analytical=lambda _: 0.0
        ),  # 2.11 asks a GPU for these, and only logs them
        patch_attributes(dist, all_gather_object=ask),
        patch_attributes(
            module, MemoryTracker=functools.partial(memory_estimator.MemoryTracker, device_filter=lambda _: True)
        ),
    ):
        try:
            yield
        finally:
            clear = getattr(module.get_group_name, "cache_clear", None)
            if clear is not None:  # it would keep every graph
                clear()


def _estimate(gm: fx.GraphModule, kind: str, is_product: Callable[[fx.Node], bool], differing: bool) -> Estimate | None:
    """What estimates times.

    Args:
        differing: products may have other times on other ranks.
    """
    places = {node: place for place, node in enumerate(gm.graph.nodes)}

    def by_place(node: fx.Node, _: int | None) -> float:
        return (places.get(node, 0) * 37 % 11 + 1) * 1e-3

    def by_cost(node: fx.Node, _: int | None) -> float:
        said = node.meta.get("cost_s")
        if isinstance(said, (int, float)) and (differing or not is_product(node)):
            return said * 1e3
        return by_place(node, None)

    def by_size(node: fx.Node, size: int | None) -> float | None:
        if is_product(node) and not differing:
            return by_place(node, None)
        if size is None:
            size = sum(_bytes(value) for value in _tensors(node.meta.get("val")))
        return 1e-3 + size * 1e-5

    def products(node: fx.Node, size: int | None) -> float | None:
        return by_place(node, size) if is_product(node) else None

    fixed: dict[str, Estimate] = {"place": by_place, "costs": by_cost, "sizes": by_size}
    if kind in fixed:
        return fixed[kind]
    return None if differing else products


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, (tuple, list)):
        return [one for part in value for one in _tensors(part)]
    return [value] if isinstance(value, torch.Tensor) else []


def _bytes(value: torch.Tensor) -> int:
    return value.numel() * value.element_size()


__all__ = ["ManualOverlapBucketing", "ScheduleOverlapBucketing", "plan_of", "undisturbed"]
