"""What Inductor makes of code on several streams.

A program is read as code whose nodes run on streams of a user, who waits as `torch:user_streams` draws it. Inductor's generated
code enters these streams, calls the kernels and events, and says which buffers are used again. It is written for a CPU, where
streams, order and buffers are chosen by the same code as for a GPU, and recorded with the stream of every op.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import fx

from tcverify.program.stream_options import MAIN_STREAM
from tcverify.pytorch.base import TorchPass
from tcverify.pytorch.compiling import inductor, record_of
from tcverify.pytorch.end_to_end.pipeline import Pipeline
from tcverify.pytorch.functional import functional_copy
from tcverify.pytorch.recording import OpRecorder
from tcverify.pytorch.streams import Anchored
from tcverify.pytorch.user_streams import run_on_streams


class CompiledStreams(TorchPass):
    """`torch.compile` of code on several streams.

    Options: those of `torch:user_streams` but for the order, which is Inductor's; others as `torch._inductor.config` names them.
    """

    name = "torch:compiled_streams"

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> fx.GraphModule | None:
        module = functional_copy(gm)
        if not run_on_streams(module, options):
            return None
        settings = {name: options[name] for name in ("allow_buffer_reuse", "inplace_buffers")}
        recorder = _Recorder()
        with inductor(settings), _streams_of_a_device():
            graph = record_of(gm, module, recorder)
        recorder.describe()
        Anchored(graph, reuse=False).write()
        return fx.GraphModule(torch.nn.Module(), graph)

    @classmethod
    def pipeline(cls, options: Mapping[str, Any]) -> Pipeline:
        return Pipeline(unreachable="compiled code runs on several streams on a GPU alone")


class _Recorder(OpRecorder):
    """Records events as well, and on which stream each op runs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "streams":
            self.graph.call_function(func, args)
            return None
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for node in reversed(self.graph.nodes):
            if "custom" in node.meta:
                break
            node.meta["custom"] = {"stream": _CURRENT[-1]}
        return result


#: The streams that have been entered, by what users call them.
_CURRENT = [MAIN_STREAM]


@contextlib.contextmanager
def on_stream(stream: int) -> Iterator[None]:
    """What generated code enters in place of a stream of a device."""
    _CURRENT.append(stream)
    try:
        yield
    finally:
        _CURRENT.pop()


@contextlib.contextmanager
def _streams_of_a_device() -> Iterator[None]:
    """Have generated code enter `on_stream`, and call each kernel where its node comes: on a CPU, calls would wait for more."""
    from torch._inductor.codegen.wrapper import EnterCudaStreamContextLine
    from torch._inductor.scheduler import Scheduler
    from torch._inductor.virtualized import V

    switch = Scheduler.generate_stream_ctx_switching

    def entered(line: Any, code: Any) -> None:
        user = V.graph.scheduler.stream_idx_to_user_obj_idx.get(line.stream_idx, MAIN_STREAM)
        code.writeline(f"with __import__({__name__!r}, fromlist=['on_stream']).on_stream({user}):")
        code.do_indent()

    def switched(scheduler: Any, node: Any) -> None:
        for backend in scheduler.backends.values():
            backend.flush()
        switch(scheduler, node)

    with (
        mock.patch.object(EnterCudaStreamContextLine, "codegen", entered),
        mock.patch.object(Scheduler, "generate_stream_ctx_switching", switched),
    ):
        yield


__all__ = ["CompiledStreams", "on_stream"]
