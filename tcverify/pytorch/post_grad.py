"""`torch._inductor.fx_passes`: what runs on every graph of torch.compile, before and behind its partition."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import fx

from tcverify.pytorch.base import TorchPass
from tcverify.pytorch.end_to_end.pipeline import EAGER_KERNELS, Pipeline, imported
from tcverify.pytorch.functional_graphs import (
    inductor_config,
    known_options,
    name_overloads,
    require_functional,
    torch_metadata,
)
from tcverify.pytorch.micro_pipeline import symmetric_memory, with_symmetric_memory


class PostGradPasses(TorchPass):
    """`post_grad_passes`.

    Options:
        is_inference: whether there is no backward graph.
        reorder_for_locality, pattern_matcher: of `torch._inductor.config`.
        bucket: which collectives are put together, and how.
        micro_pipeline, fuse_ddp: whether those passes run with it; see `MicroPipelineTp` and `FuseDdp`.
    """

    name = "torch:post_grad_passes"

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> None:
        from torch._inductor.fx_passes import post_grad

        require_functional(gm.graph)
        kinds = options["bucket"].split("+") if options["bucket"] != "none" else ()
        told = {
            "reorder_for_locality": options["reorder_for_locality"],
            "pattern_matcher": options["pattern_matcher"],
            "_micro_pipeline_tp": options["micro_pipeline"],
            "_fuse_ddp_communication": options["fuse_ddp"],
            "bucket_all_gathers_fx": "all" if "all_gather" in kinds else "none",
            "bucket_reduce_scatters_fx": "all" if "reduce_scatter" in kinds else "none",
            "bucket_all_reduces_fx": "all" if "all_reduce" in kinds else "none",
        }
        with torch_metadata(gm), inductor_config(told), symmetric_memory(options["micro_pipeline"]):
            post_grad.post_grad_passes(gm, options["is_inference"])
            name_overloads(gm)

    @classmethod
    def pipeline(cls, options: Mapping[str, Any]) -> Pipeline:
        told = {name: options[name] for name in ("reorder_for_locality", "pattern_matcher")}
        chosen = options["bucket"].split("+") if options["bucket"] != "none" else []
        settings = {
            **told,
            "_micro_pipeline_tp": options["micro_pipeline"],
            "_fuse_ddp_communication": options["fuse_ddp"],
            **{f"bucket_{kind}s_fx": "all" for kind in chosen},
            **EAGER_KERNELS,
        }
        found = Pipeline(
            settings=settings,
            call=(
                imported("torch._inductor", "config"),
                imported("torch._inductor.fx_passes.post_grad", "post_grad_passes"),
                f"with config.patch({known_options(settings)!r}):",
                f"    post_grad_passes(gm, {options['is_inference']!r})",
            ),
        )
        return with_symmetric_memory(found) if options["micro_pipeline"] else found


class JointGraphPasses(TorchPass):
    """`joint_graph_passes`: patterns, constants and views of the joint graph, or of one without gradients.

    Options:
        joint_graph_constant_folding, pattern_matcher: of `torch._inductor.config`.
    """

    name = "torch:joint_graph_passes"

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> fx.GraphModule:
        from torch._inductor.fx_passes import joint_graph

        require_functional(gm.graph)
        with torch_metadata(gm), inductor_config(options):
            made: fx.GraphModule = joint_graph.joint_graph_passes(gm)
            return made

    @classmethod
    def pipeline(cls, options: Mapping[str, Any]) -> Pipeline:
        return Pipeline(
            settings={**options, **EAGER_KERNELS},
            call=(
                imported("torch._inductor", "config"),
                imported("torch._inductor.fx_passes.joint_graph", "joint_graph_passes"),
                f"with config.patch({known_options(options)!r}):",
                "    joint_graph_passes(gm)",
            ),
        )


class Reinplace(TorchPass):
    """`reinplace_inplaceable_ops`, with the decomposition of what it leaves, as `post_grad_passes` runs them."""

    name = "torch:reinplace"

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> None:
        from torch._inductor.fx_passes import post_grad, reinplace

        require_functional(gm.graph)
        with torch_metadata(gm):
            reinplace.reinplace_inplaceable_ops(_updater(gm), gm.graph)
            post_grad.decompose_auto_functionalized(gm.graph)
            name_overloads(gm)

    @classmethod
    def pipeline(cls, options: Mapping[str, Any]) -> Pipeline:
        (taken, *_) = inspect.signature(_make_updater()).parameters
        return Pipeline(
            settings=EAGER_KERNELS,
            call=(
                imported("torch._inductor.fx_passes.post_grad", "decompose_auto_functionalized"),
                imported("torch._inductor.fx_passes.reinplace", "reinplace_inplaceable_ops"),
                imported("torch._inductor.fx_utils", "FakeTensorUpdater"),
                f"reinplace_inplaceable_ops(FakeTensorUpdater({'gm.graph' if taken == 'graph' else 'gm'}), gm.graph)",
                "decompose_auto_functionalized(gm.graph)",
            ),
        )


class PostGradFusions(TorchPass):
    """What `post_grad_fusion_options` of `torch._inductor.config` name: fusions of like ops, then patterns of splits and parts.

    They run in the order of `post_grad_passes`, without the other passes there, and on reshapes, to which Inductor turns views.

    Options:
        fusions: their names, in the order in which they run.
        min_fuse_set_size, max_fuse_search_depth, fuse_nodes_with_same_parent, fuse_nodes_with_same_users,
        shape_broadcast_batch_linear: options of each fusion.
        threshold_to_cat: of `split_cat_aten_pass`: how many parts are worth it.
    """

    name = "torch:post_grad_fusions"

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> None:
        from torch._inductor import pattern_matcher
        from torch._inductor.fx_passes import decompose_mem_bound_mm as _registers  # noqa: F401 - its patterns, on import
        from torch._inductor.fx_passes import group_batch_fusion, post_grad, split_cat

        require_functional(gm.graph)
        chosen = _chosen_fusions(options)
        with torch_metadata(gm), inductor_config({"post_grad_fusion_options": chosen}):
            post_grad.view_to_reshape(gm)
            updater = _updater(gm)
            group_batch_fusion.group_batch_fusion_passes(gm.graph, pre_grad=False)
            for name in chosen:
                if name in split_cat.POST_GRAD_PATTERNS:
                    split_cat.POST_GRAD_PATTERNS[name].apply(gm.graph)
            pattern_matcher.stable_topological_sort(gm.graph)
            updater.incremental_update()
            name_overloads(gm)

    @classmethod
    def pipeline(cls, options: Mapping[str, Any]) -> Pipeline:
        settings = {"post_grad_fusion_options": _chosen_fusions(options), **EAGER_KERNELS}
        return Pipeline(
            settings=settings,
            call=(
                imported("torch._inductor", "config"),
                imported("torch._inductor.fx_passes.post_grad", "post_grad_passes"),
                f"with config.patch({known_options(settings)!r}):",
                "    post_grad_passes(gm, False)",
            ),
        )


def _chosen_fusions(options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Options of fusions as `torch._inductor.config` takes them, by the name of the fusion."""
    each = {name: value for name, value in options.items() if name != "fusions"}
    return {name: each for name in options["fusions"].split("+")}


def _updater(gm: fx.GraphModule) -> Any:
    """What keeps metadata true while a pass changes a graph; older versions of torch make it of the graph alone."""
    make = _make_updater()
    (taken, *_) = inspect.signature(make).parameters
    return make(gm.graph if taken == "graph" else gm)


def _make_updater() -> Any:
    from torch._inductor import fx_utils

    return fx_utils.FakeTensorUpdater


__all__ = ["JointGraphPasses", "PostGradFusions", "PostGradPasses", "Reinplace"]
