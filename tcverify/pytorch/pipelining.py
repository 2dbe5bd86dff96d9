"""Pipeline parallelism as a pass: a training step becomes what a rank does under a schedule of torch.distributed.pipelining.

The stages of a rank are built from the options of the program, and the schedule runs on them, alone, on tensors that are zero.
Every op is recorded. Sends, receives and their waits are recorded where the schedule asks a process group for them, so that the
graphs of all ranks say in which order messages are to meet. At the end the rank that has a result broadcasts it: all ranks
return what the program returns.
"""

from __future__ import annotations

import contextlib
import csv
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import fx

from tcverify.errors import Unsupported
from tcverify.ops import resolve
from tcverify.program.graph import lazy_module
from tcverify.pytorch.base import TorchPass
from tcverify.pytorch.compat import filter_known_options
from tcverify.pytorch.recording import OpRecorder
from tcverify.pytorch.training_steps import read_step, with_inputs_of
from tcverify.strategies.training.model import SHIFT, Stage, TrainingStep, as_tuple, boundaries, training_program

Tensor = torch.Tensor


class PipelineSchedule(TorchPass):
    """Runs a rank's stages of a training step under the schedule that the options of the program name.

    Raises:
        Unsupported: the program is no such training step, or the schedule refuses its sizes.
    """

    name = "torch:pipelining"

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> fx.GraphModule:
        step = read_step(gm, TrainingStep, training_program)
        if step.passes != 1 or step.optimizer or step.alternating:
            raise Unsupported("a batch runs through all stages of a pipeline once, and nothing updates parameters")
        group, members = list(gm.meta["groups"].items())[-1]
        rank = _Rank(step, members.index(gm.meta["rank"]), len(members), group)
        for name, shape in step.inputs().items():
            rank.give(name, shape)
        rank.run(options)
        (returned,) = (node.args[0] for node in gm.graph.nodes if node.op == "output")
        graph = rank.returning(returned)
        with_inputs_of(gm, graph)
        return lazy_module(gm, graph)


class _Rank:
    """One rank of a pipeline: its stages, what is recorded of them, and what it ends up with."""

    def __init__(self, step: TrainingStep, position: int, ranks: int, group: str) -> None:
        resolve_group: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
        self._step, self._position, self._ranks = step, position, ranks
        self._name, self._group = group, resolve_group(group)
        self._values: dict[str, Tensor] = {}
        self._recorder = _Messages(group)
        self._modules: dict[int, Stage] = {}
        self._losses: list[Tensor] = []
        self._outputs: tuple[Tensor, ...] = ()

    def give(self, name: str, shape: Sequence[int]) -> None:
        """Add an input."""
        self._values[name] = torch.zeros(shape)
        self._recorder.input(name, self._values[name])

    def run(self, options: Mapping[str, Any]) -> None:
        """Run the schedule."""
        step, values = self._step, self._values
        own = [stage for stage in range(len(step.stages)) if step.rank_of(stage, self._ranks) == self._position]
        if len(step.stages) % self._ranks:
            raise Unsupported(f"there are {len(step.stages)} stages for {self._ranks} ranks")
        schedule = self._schedule(own, options)
        first, last = 0 in own, len(step.stages) - 1 in own
        named = {SHIFT: values[SHIFT]} if step.shifted else {}
        with self._recorder.recording():
            output = schedule.step(
                *([values["x"]] if first else []),
                target=values["target"] if last else None,
                losses=self._losses,
                **named,
            )
        self._outputs = as_tuple(output) if last else ()

    def _schedule(self, own: Sequence[int], options: Mapping[str, Any]) -> Any:
        """The schedule of torch for these stages, which leaves out of the record what it does before its first action."""
        stages = self._stages(own)
        told: dict[str, Any] = {"loss_fn": self._step.loss_of, "scale_grads": self._step.scale_grads}
        try:
            made = _made(self._step, stages, told, options)
        except ValueError as error:
            raise Unsupported(f"{self._step.schedule}: {' '.join(str(error).split())[:200]}") from error
        for name in ("_initialize_stage", "_initialize_stages"):
            if hasattr(made, name):
                setattr(made, name, self._recorder.leaving_out(getattr(made, name), lambda: _buffers(stages)))
        return made

    def _stages(self, own: Sequence[int]) -> list[Any]:
        """Stages of torch. They are told the shapes of what they get and give, as the ranks cannot ask each other."""
        from torch.distributed.pipelining import PipelineStage

        step, stages = self._step, []
        edges = list(boundaries(step, self._values))
        for number in own:
            module = self._modules[number] = Stage(step, number, self._values)
            stages.append(
                PipelineStage(
                    module, number, len(step.stages), torch.device("cpu"), input_args=edges[number],
                    output_args=edges[number + 1], group=self._group,
                )
            )  # fmt: skip
        return stages

    def returning(self, returned: Mapping[str, Any]) -> fx.Graph:
        """The recorded graph, which returns what the program does.

        Args:
            returned: by the graph of the program, whose nodes say shapes and dtypes.
        """
        last = len(self._step.stages) - 1
        grads = {name: p.grad for module in self._modules.values() for name, p in module.named_parameters()}
        stages = {name: stage for stage in range(last + 1) for name in self._step.parameters(stage)}
        losses = [self._shared(like, last, _at(self._losses, k)) for k, like in enumerate(returned["losses"])]
        outputs = [self._shared(like, last, _at(self._outputs, k)) for k, like in enumerate(returned["outputs"])]
        found = {name: self._shared(like, stages[name], grads.get(name)) for name, like in returned["grads"].items()}
        graph = self._recorder.graph
        order_accumulations(graph)
        graph.output({"losses": losses, "outputs": tuple(outputs), "grads": found})
        graph.lint()
        return graph

    def _shared(self, like: fx.Node, stage: int, value: Tensor | None) -> fx.Node:
        """A result that the rank of a stage has: zero there if the schedule left none."""
        graph, owner = self._recorder.graph, self._step.rank_of(stage, self._ranks)
        if owner == self._position and value is not None:
            given = self._recorder.node(value)
        else:
            val = like.meta["val"]
            given = graph.call_function(resolve("aten::zeros"), (list(val.shape),), {"dtype": val.dtype})
        started = graph.call_function(resolve("_c10d_functional::broadcast"), (given, owner, self._name))
        return graph.call_function(resolve("_c10d_functional::wait_tensor"), (started,))


def order_accumulations(graph: fx.Graph) -> None:
    """Put sums into gradients that follow one another into the order of what they add to.

    torch keeps the parameters of a stage in sets of objects, whose order changes from run to run and means nothing.
    """
    place: dict[fx.Node, int] = {}
    together: list[fx.Node] = []
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.add_.Tensor and not {*node.all_input_nodes} & {*together}:
            together.append(node)
            continue
        names, before = [one.name for one in together], node
        for one, name in zip(sorted(together, key=lambda one: place[one.all_input_nodes[0]]), names, strict=True):
            before.prepend(one)
            one.name = name
            place[one] = len(place)
        together = [node] if node.target is torch.ops.aten.add_.Tensor else []
        place[node] = len(place)


def _made(step: TrainingStep, stages: list[Any], told: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """The schedule itself, or the runtime for schedules of users with the same order of actions.

    Raises:
        ValueError: the schedule cannot have so many stages or microbatches.
    """
    from torch.distributed.pipelining import schedules

    kind = schedules.get_schedule_class(step.schedule)
    if issubclass(kind, schedules.PipelineScheduleSingle):
        if len(stages) > 1:
            raise ValueError(f"{len(stages)} stages on a rank")
        made = kind(stages[0], step.microbatches, **told)
    else:
        late = filter_known_options(kind, {"defer_pp_recv": options["defer_pp_recv"]})
        made = kind(stages, step.microbatches, **late, **told)
    if options["actions"] == "own" or not made.pipeline_order:
        return made
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/actions.csv"
        runtime = schedules._PipelineScheduleRuntime(stages, step.microbatches, **told)
        if options["actions"] == "compute_comms" and hasattr(made, "pipeline_order_with_comms"):
            made._dump_csv(file, format="compute_comms")
            runtime._load_csv(file, format="compute_comms")
        else:
            _write_actions(file, made.pipeline_order)
            runtime._load_csv(file, format="compute_only")
    return runtime


def _write_actions(file: str, order: Mapping[int, Sequence[Any]]) -> None:
    """Write what computes, as files of schedules have it: ranks in rows, nothing where a rank idles."""
    with open(file, "w", encoding="utf-8", newline="") as opened:
        rows = csv.writer(opened)
        for rank in sorted(order):
            rows.writerow(["" if one is None else str(one) for one in order[rank] if one is None or one.is_compute_op])


def _buffers(stages: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """What stages receive into, with names that reports show."""
    for stage in stages:
        for what, received in (("activation", stage.args_recv_info), ("gradient", stage.grad_recv_info)):
            for microbatch, buffers in received.items():
                for place, one in enumerate(buffers):
                    if isinstance(getattr(one, "buffer", None), Tensor):
                        part = f"_part_{place}" if len(buffers) > 1 else ""
                        yield f"{what}_of_stage_{stage.stage_index}_microbatch_{microbatch}{part}", one.buffer


def _at(values: Sequence[Tensor], place: int) -> Tensor | None:
    """The value at a place, where there is one."""
    return values[place] if place < len(values) else None


class _Messages(OpRecorder):
    """Records ops, and the messages that a process group is asked to send and receive."""

    records_views: ClassVar[bool] = True

    def __init__(self, group: str) -> None:
        super().__init__()
        self._group = group
        self._heard = True

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record what is done meanwhile. Process groups send and receive nothing."""

        def send(group: Any, tensors: list[Tensor], peer: int, tag: int) -> _Work:
            return self._message("isend", tensors, peer, tag)

        def recv(group: Any, tensors: list[Tensor], peer: int, tag: int) -> _Work:
            return self._message("irecv", tensors, peer, tag)

        from torch.distributed.pipelining import schedules

        # A schedule that fails writes all of its actions into the log.
        quiet = mock.patch.object(schedules.logger, "disabled", True)
        with mock.patch.multiple(dist.ProcessGroup, send=send, recv=recv), quiet, self:
            yield

    def leaving_out(
        self, call: Callable[..., Any], made: Callable[[], Iterable[tuple[str, Tensor]]]
    ) -> Callable[..., Any]:
        """A call during which nothing is recorded. What it receives is ones: ranks vote so that shapes are known to all.

        Args:
            made: memory that the call has made, with names.
        """

        def silent(*args: Any, **kwargs: Any) -> Any:
            self._heard = False
            try:
                result = call(*args, **kwargs)
            finally:
                self._heard = True
            for name, value in made():
                self.node(value)._rename(name)
            return result

        return silent

    def _message(self, op: str, tensors: list[Tensor], peer: int, tag: int) -> _Work:
        if not self._heard:
            if op == "irecv":
                tensors[0].fill_(1)
            return _Work(lambda: None)
        target = resolve(f"_c10d_functional::{op}")
        started = [self.graph.call_function(target, (self.node(one), peer, tag, self._group)) for one in tensors]
        wait = resolve("_c10d_functional::wait_tensor")
        return _Work(lambda: [self.graph.call_function(wait, (one,)) for one in started])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._heard:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Work(dist.Work):
    """A message on its way; the first wait for it counts."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        super().__init__()
        self._wait: Callable[[], Any] | None = wait

    def wait(self, timeout: Any = None) -> bool:
        """Record the wait."""
        if self._wait is not None:
            self._wait()
        self._wait = None
        return True


__all__ = ["PipelineSchedule", "order_accumulations"]
