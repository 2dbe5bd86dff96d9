"""A pass with a well-known mistake: a stream that does not wait for its input."""

import torch
from torch import fx


def own_stream(gm: fx.GraphModule) -> fx.GraphModule:
    """run all_reduce(x) on stream 1; its readers on stream 0 wait for it"""
    ops, graph = torch.ops.tensor_cast, gm.graph
    for reduced in [n for n in graph.nodes if n.target is ops.all_reduce.default]:
        addend, readers = reduced.args[0], list(reduced.users)
        with graph.inserting_before(reduced):
            bound = graph.call_function(ops._internal_wait_and_bind.default, (addend, 1, []))
        reduced.replace_input_with(addend, bound)
        with graph.inserting_after(reduced):
            token = graph.call_function(ops._internal_record.default, (reduced, 1))
        for reader in readers:
            with graph.inserting_before(reader):
                ready = graph.call_function(ops._internal_wait_and_bind.default, (reduced, 0, [token]))
            reader.replace_input_with(reduced, ready)
            ready.meta["val"] = torch.empty_like(reduced.meta["val"])
        bound.meta["val"] = torch.empty_like(addend.meta["val"])
        token.meta["val"] = reduced.meta["val"].new_empty((), dtype=torch.int64)
    gm.recompile()
    return gm
