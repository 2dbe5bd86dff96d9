"""What Inductor makes of code on several streams.

A program is read as code whose nodes run on streams of a user, who waits as `torch:user_streams` draws it. Inductor's generated
code enters these streams, calls the kernels and events, and says which buffers are used again or deleted. It is written for a
CPU, where streams, order and buffers are chosen by the same code as for a GPU, and recorded with the stream of every op.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tcverify.execution.asynchrony import storage_of
from tcverify.program.graph import lazy_module
from tcverify.program.stream_options import MAIN_STREAM
from tcverify.pytorch.base import TorchPass
from tcverify.pytorch.compiling import inductor, record_of
from tcverify.pytorch.end_to_end.pipeline import Pipeline
from tcverify.pytorch.functional import functional_copy
from tcverify.pytorch.recording import OpRecorder
from tcverify.pytorch.streams import Anchored, is_tensor, stream_of
from tcverify.pytorch.user_streams import run_on_streams


class CompiledStreams(TorchPass):
    """`torch.compile` of code on several streams, whose variables live until it returns.

    Options: those of `torch:user_streams` but for the order, which is Inductor's; others as `torch._inductor.config` names them.
    `caching` is whether the allocator gives out again what generated code has deleted, as that of CUDA does.
    """

    name = "torch:compiled_streams"

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> fx.GraphModule | None:
        module = functional_copy(gm)
        if not run_on_streams(module, options):
            return None
        settings = {name: options[name] for name in ("allow_buffer_reuse", "inplace_buffers")}
        made = _Recorder()
        with inductor(settings), _streams_of_a_device():
            graph = record_of(gm, module, made)
        made.describe()
        Anchored(graph, made.given_out() if options["caching"] else {}).write()
        return lazy_module(torch.nn.Module(), graph)

    @classmethod
    def pipeline(cls, options: Mapping[str, Any]) -> Pipeline:
        return Pipeline(unreachable="compiled code runs on several streams on a GPU alone")


class _Recorder(OpRecorder):
    """Records events as well, on which stream each op runs, and what is deleted."""

    def __init__(self) -> None:
        super().__init__()
        self._streams = [MAIN_STREAM]  # those that have been entered, by what users call them
        self._deleted: dict[int, fx.Node] = {}  # storage -> the node behind which it was deleted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "streams":
            self.graph.call_function(func, args)
            return None
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for node in reversed(self.graph.nodes):
            if "custom" in node.meta:
                break
            node.meta["custom"] = {"stream": self._streams[-1]}
        return result

    @contextlib.contextmanager
    def stream(self, number: int) -> Iterator[None]:
        """What generated code enters in place of a stream of a device."""
        self._streams.append(number)
        try:
            yield
        finally:
            self._streams.pop()

    def delete(self, value: Any) -> None:
        """What generated code calls where it deletes a buffer."""
        for one in pytree.tree_leaves(value):
            if isinstance(one, torch.Tensor) and storage_of(one) in self._roots:
                self._deleted[storage_of(one)] = next(reversed(self.graph.nodes))

    def given_out(self) -> dict[fx.Node, list[fx.Node]]:
        """What CUDA's allocator makes of it: by a node that allocates memory, the value that had it before.

        Memory goes back to the stream that it was allocated on, which gets the smallest block that is large enough.
        """
        blocks: dict[int, fx.Node] = {}  # storage -> the node that allocates it
        last: dict[int, int] = {}  # storage -> the position of the node behind which it is free
        place = {node: number for number, node in enumerate(self.graph.nodes)}
        for node, number in place.items():
            for one in filter(is_tensor, [*node.all_input_nodes, node]):
                blocks.setdefault(storage_of(one.meta["val"]), one)
                last[storage_of(one.meta["val"])] = number
        released = defaultdict(list)
        for storage, node in self._deleted.items():
            released[max(last[storage], place[node])].append(blocks[storage])
        # What kernels compute on the way is neither deleted nor returned: on a device it has no memory.
        returned = [storage_of(one.meta["val"]) for one in self.graph.output_node().all_input_nodes if is_tensor(one)]
        allocating = {blocks[storage] for storage in (*self._deleted, *returned)}
        free: list[fx.Node] = []
        found: dict[fx.Node, list[fx.Node]] = {}
        for node, number in place.items():
            if node.op == "call_function" and node in allocating:
                fitting = [one for one in free if stream_of(one) == stream_of(node) and _size(one) >= _size(node)]
                if fitting:
                    found[node] = [min(fitting, key=_size)]
                    free.remove(*found[node])
            free += released[number]
        return found


def _size(node: fx.Node) -> int:
    """The memory of a tensor, in units of the 512 bytes to which CUDA's allocator rounds."""
    return -(-int(node.meta["val"].untyped_storage().nbytes()) // 512)


def recorder() -> _Recorder:
    """That of the code which is running."""
    return next(mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, _Recorder))


@contextlib.contextmanager
def _streams_of_a_device() -> Iterator[None]:
    """Have generated code tell its recorder of streams and deletions, and call each kernel where its node comes.

    On a CPU, calls would wait for more.
    """
    from torch._inductor.codegen.wrapper import EnterCudaStreamContextLine, FreeIfNotReusedLine
    from torch._inductor.scheduler import Scheduler
    from torch._inductor.virtualized import V

    switch, free = Scheduler.generate_stream_ctx_switching, FreeIfNotReusedLine.codegen
    this = f"__import__({__name__!r}, fromlist=['recorder']).recorder()"

    def entered(line: Any, code: Any) -> None:
        user = V.graph.scheduler.stream_idx_to_user_obj_idx.get(line.stream_idx, MAIN_STREAM)
        code.writeline(f"with {this}.stream({user}):")
        code.do_indent()

    def switched(scheduler: Any, node: Any) -> None:
        for backend in scheduler.backends.values():
            backend.flush()
        switch(scheduler, node)

    def freed(line: Any, code: Any) -> None:
        if not line.is_reused:
            code.writeline(f"{this}.delete({line.node.get_name()})")
        free(line, code)

    with (
        mock.patch.object(EnterCudaStreamContextLine, "codegen", entered),
        mock.patch.object(Scheduler, "generate_stream_ctx_switching", switched),
        mock.patch.object(FreeIfNotReusedLine, "codegen", freed),
    ):
        yield


__all__ = ["CompiledStreams", "recorder"]
