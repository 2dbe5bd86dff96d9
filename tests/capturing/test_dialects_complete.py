"""Every op that torch defines for communication means something here, or the table says why it does not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed._functional_collectives
import torch.distributed._symmetric_memory
import torch.distributed.tensor

from tcverify.capturing import c10d_calls
from tcverify.ops import lookup, resolve, schema_of
from tcverify.program import Mesh, spmd_program

#: What torch 2.9 has of these namespaces; later ones have more.
OLD = {
    "_c10d_functional": (
        "all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_", "all_gather_into_tensor",
        "all_gather_into_tensor_out", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced", "all_to_all_single", "broadcast", "broadcast_", "wait_tensor",
    ),
    "_c10d_functional_autograd": ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"),
    "_dtensor": ("shard_dim_alltoall",),
    "symm_mem": (
        "one_shot_all_reduce", "two_shot_all_reduce_", "multimem_all_reduce_", "fused_all_gather_matmul",
        "fused_matmul_reduce_scatter", "_low_contention_all_gather", "_low_contention_reduce_scatter",
    ),
}  # fmt: skip
COMMUNICATION = (*OLD, "c10d")


def ops_of(namespace: str) -> list[str]:
    names = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith(f"{namespace}::")}
    return sorted(name.partition("::")[2] for name in names)


@pytest.mark.parametrize("namespace", OLD)
def test_every_op_has_a_meaning_or_a_reason(namespace: str) -> None:
    known = ops_of(namespace)
    assert len(known) >= len(OLD[namespace])
    for name in known:
        packet = getattr(getattr(torch.ops, namespace), name)
        for overload in packet.overloads():
            op = lookup(getattr(packet, overload))
            if op.run is None:
                assert "gives it no meaning yet" not in op.reason, op.name
                assert len(op.reason.split()) >= 5, op.name


@pytest.mark.parametrize(("namespace", "name"), [(ns, name) for ns, names in OLD.items() for name in names])
def test_what_compilers_emit_has_a_meaning(namespace: str, name: str) -> None:
    assert lookup(resolve(f"{namespace}::{name}")).run is not None


def test_an_unknown_op_of_a_known_namespace_is_told_from_one_with_a_reason() -> None:
    library = torch.library.Library("_c10d_functional", "FRAGMENT")
    library.define("of_tomorrow(Tensor x, str group_name) -> Tensor")
    assert "gives it no meaning yet" in lookup(torch.ops._c10d_functional.of_tomorrow.default).reason
    library._destroy()


def test_signatures_are_those_of_torch_but_for_what_is_written() -> None:
    for namespace in OLD:
        for name in ops_of(namespace):
            target = getattr(getattr(torch.ops, namespace), name).default
            mine, theirs = schema_of(target), target._schema
            assert mine is not None
            assert [a.name for a in mine.arguments] == [a.name for a in theirs.arguments], name
            for ours, torchs in zip(mine.arguments, theirs.arguments, strict=True):
                written = torchs.alias_info is not None and torchs.alias_info.is_write
                assert not written or (ours.alias_info is not None and ours.alias_info.is_write), (name, ours.name)


def test_collectives_of_process_groups_are_rewritten_or_refused_with_a_reason() -> None:
    rewritten = {name.strip("_") for name in vars(c10d_calls._Rewriter) if name.startswith("_")}
    for name in ops_of("c10d"):
        assert (name.strip("_") in rewritten) != (name in c10d_calls.REASONS), name


def test_a_group_of_unknown_size_is_said_to_be_so() -> None:
    from tcverify.errors import UnsupportedOp
    from tcverify.ops import TensorSpec, infer

    target = resolve("_dtensor::shard_dim_alltoall")
    x = TensorSpec.contiguous((2, 4), torch.float32)
    with pytest.raises(UnsupportedOp, match="size of group 'tp', which is not known"):
        infer(target, (x, 0, 1, "tp"), {}, lambda: 0)
    made = infer(target, (x, 0, 1, "tp"), {}, lambda: 0, {"tp": (3, 1)})
    assert made.shape == (4, 2)
    assert infer(target, (x, 0, 1, "tp"), {}, lambda: 0, {"tp": (0, 1, 2, 3)}).shape == (8, 1)


def test_metadata_of_ops_that_depend_on_the_size_of_a_group_is_judged() -> None:
    from torch import fx

    from tcverify import verify
    from tcverify.program import InputSpec

    mesh = Mesh.grid({"tp": 2})
    program = spmd_program(
        mesh,
        [InputSpec("x", (4, 4))],
        lambda b: b.call("aten::relu", b.call("_dtensor::shard_dim_alltoall", b.input("x"), 0, 1, "tp")),
    )

    def twice(module: fx.GraphModule, *, stale: bool) -> fx.GraphModule:
        node = next(n for n in module.graph.nodes if "alltoall" in n.name)
        with module.graph.inserting_after(node):
            back = module.graph.call_function(node.target, (node, 1, 0, "tp"))
        with module.graph.inserting_after(back):
            again = module.graph.call_function(node.target, (back, 0, 1, "tp"))
        relu = next(n for n in module.graph.nodes if n.name == "relu")
        relu.replace_input_with(node, again)
        back.meta["val"] = (
            node.meta["val"] if stale else module.graph.find_nodes(op="placeholder")[0].meta["val"].clone()
        )
        again.meta["val"] = node.meta["val"].clone()
        module.recompile()
        return module

    sound = verify(lambda module: twice(module, stale=False), program)
    assert (sound.status, [f.kind for f in sound.findings]) == ("passed", [])
    planted = verify(lambda module: twice(module, stale=True), program)
    assert "stale-metadata" in [f.kind for f in planted.hygiene]
