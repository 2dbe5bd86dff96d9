"""Passes of PyTorch that put other communication in the place of collectives: `low_contention_collectives`, `decomp_comms`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from tcverify.pytorch.base import TorchPass
from tcverify.pytorch.compat import patch_attributes
from tcverify.pytorch.end_to_end.pipeline import EAGER_KERNELS, Pipeline, imported


class LowContentionCollectives(TorchPass):
    """`replace_collectives_with_low_contention`, as if symmetric memory were enabled.

    Options:
        groups: for "all" groups, or the "first" of the mesh.
        min_bytes: `low_contention_min_bytes_per_rank`.
        skip_overlap_check: `low_contention_skip_overlap_check`.
    """

    name = "torch:low_contention_collectives"

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> None:
        from torch._inductor import config
        from torch._inductor.fx_passes import low_contention_collectives as module
        from torch.distributed import _symmetric_memory

        enabled = list(gm.meta["groups"])
        if options["groups"] == "first":
            enabled = enabled[:1]

        def enable(name: str) -> None:
            raise RuntimeError(f"group {name} has no symmetric memory")

        settings = {
            "aten_distributed_optimizations.low_contention_min_bytes_per_rank": options["min_bytes"],
            "aten_distributed_optimizations.low_contention_skip_overlap_check": options["skip_overlap_check"],
        }
        with (
            patch_attributes(
                _symmetric_memory,
                is_symm_mem_enabled_for_group=lambda name: str(name) in enabled, enable_symm_mem_for_group=enable,
            ),
            config.patch(settings),
        ):  # fmt: skip
            module.replace_collectives_with_low_contention(gm.graph)
        gm.recompile()

    @classmethod
    def pipeline(cls, options: Mapping[str, Any]) -> Pipeline:
        patched = "mock.patch.object(symmetric_memory, 'is_symm_mem_enabled_for_group', lambda _: True)"
        settings = {
            "aten_distributed_optimizations.low_contention_min_bytes_per_rank": options["min_bytes"],
            "aten_distributed_optimizations.low_contention_skip_overlap_check": options["skip_overlap_check"],
        }
        return Pipeline(
            settings={
                "aten_distributed_optimizations.enable_low_contention_collectives": True,
                **settings,
                **EAGER_KERNELS,
            },
            unreachable="what it puts in the place of collectives needs CUDA and symmetric memory",
            definitions=(
                imported("unittest", "mock") + "\n\nimport torch.distributed._symmetric_memory as symmetric_memory",
            ),
            given=(patched, f"torch._inductor.config.patch({settings!r})"),
            standing_in="groups that are said to have symmetric memory",
            call=(
                imported("torch._inductor.fx_passes", "low_contention_collectives"),
                "low_contention_collectives.replace_collectives_with_low_contention(gm.graph)",
            ),
        )


class DecompComms(TorchPass):
    """`decomp_comms`: all_gathers whose result only feeds Gram matrices become all_reduces of those."""

    name = "torch:decomp_comms"

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> None:
        from torch._inductor.fx_passes import decomp_comms as module

        module.decomp_comms(gm)
        gm.recompile()

    @classmethod
    def pipeline(cls, options: Mapping[str, Any]) -> Pipeline:
        return Pipeline(
            settings={"aten_distributed_optimizations.allow_comms_decompositions": True, **EAGER_KERNELS},
            call=(imported("torch._inductor.fx_passes.decomp_comms", "decomp_comms"), "decomp_comms(gm)"),
        )


__all__ = ["DecompComms", "LowContentionCollectives"]
