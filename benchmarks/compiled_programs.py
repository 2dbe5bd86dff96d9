"""Draws programs for torch.compile, compiles them for a device, runs what comes of it, and judges that; see gpu_compile.py."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import random
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.utils import _pytree as pytree

from tcverify.campaign.patterns import ProgramPattern
from tcverify.cases.counterexample import read_counterexample
from tcverify.checks.values.native import native_differences
from tcverify.errors import TcverifyError, Unsupported
from tcverify.execution import Comparison, Lockstep, RankResult, Run, range_used, rounding_noise
from tcverify.execution.asynchrony import TIMINGS
from tcverify.ops import schema_of
from tcverify.program import Doubt, Mesh, Program, dumps
from tcverify.pytorch import SUBJECTS, TorchSubject
from tcverify.pytorch.compiling import compile_graph, example_inputs, inductor, is_compiled
from tcverify.pytorch.effects import effects_as
from tcverify.pytorch.end_to_end.pipeline import EAGER_KERNELS, Code, Pipeline
from tcverify.pytorch.executing import Call, run_calls
from tcverify.pytorch.findings import TorchFinding, read_findings
from tcverify.pytorch.functional import functional_copy
from tcverify.pytorch.groups import groups_of
from tcverify.pytorch.overlap import undisturbed
from tcverify.registry.references import find
from tcverify.strategies import DECODERS, Decoder, all_meshes
from tcverify.strategies.draft import NoSite
from tcverify.strategies.functional import choices, compiled

#: Strategies besides the subject's own.
OTHERS = ("functional", "compiled", "traced", "bucketing", "data-parallel", "async-tp", "sequence-functional")

#: Sizes that are no multiples of Triton's blocks, and some that are.
HIDDEN = (8, 33, 130, 257, 5, 520, 64, 4)
TOKENS = (1, 2, 3, 17, 43, 2050)

#: Values, other than the default, of settings that decide which code is generated and not what it computes.
CODE: Mapping[str, tuple[Any, ...]] = {
    "b2b_gemm_pass": (True,), "combo_kernels": (True,), "combo_kernel_allow_mixed_sizes": (2,),
    "combo_kernel_per_subkernel_blocks": (True,), "comprehensive_padding": (False,), "dce": (True,),
    "delay_realize_cheap_outputs": (False,), "emulate_precision_casts": (True,), "epilogue_fusion": (False,),
    "epilogue_fusion_first": (True,), "expand_dimension_for_pointwise_nodes": (True,), "force_pointwise_cat": (True,),
    "force_shape_pad": (True,), "inplace_padding": (False,), "loop_index_inversion_in_fusion": (False,),
    "loop_ordering_after_fusion": (True, False), "max_fusion_size": (1, 2, 4), "max_pointwise_cat_inputs": (0, 2),
    "memory_planning": (True,), "min_num_split": (2, 7), "online_softmax": (False,),
    "optimize_scatter_upon_const_tensor": (False,), "padding_stride_threshold": (0,),
    "partitioned_scatter_enabled": (True,), "pick_loop_orders": (False,), "realize_opcount_threshold": (1, 1000),
    "realize_reads_threshold": (1, 100), "score_fusion_memory_threshold": (0,), "shape_padding": (False,),
    "size_threshold_for_succ_based_strategy": (1 << 30,), "split_reductions": (False,),
    "triton.coalesce_tiling_analysis": (False,), "triton.cooperative_reductions": (True,),
    "triton.dense_indexing": (True,), "triton.divisible_by_16": (False,), "triton.force_cooperative_reductions": (True,),
    "triton.max_tiles": (2, 3), "triton.mix_order_reduction": (True, False), "triton.multi_kernel": (2, 3),
    "triton.nested_reduction": (True,), "triton.persistent_reductions": (False,),
    "triton.prefer_nd_tiling": (True,), "triton.tile_reductions": (True,),
    "triton.tiling_prevents_pointwise_fusion": (False,), "triton.tiling_prevents_reduction_fusion": (False,),
    "triton.use_block_ptr": (True,), "unroll_reductions_threshold": (1, 100),
}  # fmt: skip

#: At most so many of them are set for a program.
MOST_SET = 6

#: Defects that can be planted: another result of one rank, kernels that leave out their last element, no waits, a crash.
PLANTS = ("value", "block", "wait", "crash")

#: Seconds in which options are left out of a program with a finding.
SHRINKING = 10.0

#: Where Triton keeps what it has compiled: the variable of this script's processes.
TRITON_CACHE = "TCVERIFY_TRITON_CACHE"


# -------------------------------------------------------------------------------------------------------------- programs


def drawn(number: int, planted: str | None = None) -> tuple[TorchSubject, Program]:
    """The program of a number, with options, and the subject that they are of."""
    generator = random.Random(number)
    compiles, others = SUBJECTS["compile"], [SUBJECTS[name] for name in reached() if name != "compile"]
    one = compiles if planted or generator.random() < 0.5 else generator.choice(others)
    own = generator.choice(one.strategy.split(","))
    strategy = "traced" if planted else generator.choice((own, own, *OTHERS))
    mesh = generator.choice(all_meshes(generator.choice((2, 2, 2, 3, 4))))
    decoder = DECODERS[strategy]
    program = next(filter(functional, (decoded(decoder, mesh, generator) for _ in range(100))))
    options = {} if planted else {name: generator.choice(values) for name, values in one.draws.items()}
    if not planted and generator.random() < 0.5:
        for name in generator.sample(sorted(CODE), generator.randint(1, MOST_SET)):
            options[name] = generator.choice(CODE[name])
    return one, replace(program, options={**program.options, **options}, labels=(strategy, *program.labels))


@functools.cache
def reached() -> tuple[str, ...]:
    """The subjects that torch.compile runs, with the default values of their options."""
    found = []
    for name, one in SUBJECTS.items():
        if one.here:
            kind = find(one.target)[0]
            if not why_not(kind.pipeline(kind.chosen({}, {}))):
                found.append(name)
    return tuple(found)


def decoded(decoder: Decoder, mesh: Mesh, generator: random.Random) -> Program:
    """A program of larger sizes, or of the usual ones where its values would grow too much."""
    drawn = generator.randbytes(decoder.width)
    try:
        with larger():
            return decoder.decode(mesh, drawn)
    except NoSite:
        return decoder.decode(mesh, drawn)


def functional(program: Program) -> bool:
    """Whether torch.compile can be given its graphs."""
    try:
        return all(functional_copy(program.graph_module(rank)) for rank in range(program.world_size))
    except Unsupported:
        return False


@contextlib.contextmanager
def larger() -> Iterator[None]:
    """Draw programs of larger sizes meanwhile."""
    sizes = {"hidden": HIDDEN, "tokens": TOKENS}
    with mock.patch.dict(choices.HEADER, sizes), mock.patch.object(compiled, "HIDDEN", HIDDEN):
        yield


# ------------------------------------------------------------------------------------------------------------- compiling


@dataclass
class Seen:
    """What compiling was seen to do.

    Attributes:
        ranks: compiled ones.
        kernels: that were generated for them.
        acted: how often a pass was called, and changed something.
        planted: places where a planted defect took effect.
    """

    ranks: int = 0
    kernels: int = 0
    called: int = 0
    acted: int = 0
    planted: int = 0


def why_not(pipeline: Pipeline) -> str:
    """Why a pipeline is not one that graphs without gradients can be compiled by here; empty if it is."""
    if pipeline.backend != "inductor" or not pipeline.entry.startswith("torch.compile"):
        return f"users reach it by {pipeline.entry} with the backend {pipeline.backend}"
    return pipeline.unreachable or ", ".join(pipeline.given) or pipeline.training


def pipeline_of(one: TorchSubject, program: Program) -> Pipeline:
    """How users of torch.compile reach a subject with the options of a program."""
    kind = find(one.target)[0]
    found: Pipeline = kind.pipeline(kind.chosen(program.options, {}))
    if why_not(found):
        raise Unsupported(f"torch.compile does not run it here: {why_not(found)}")
    code = {name: value for name, value in program.options.items() if name in CODE}
    return replace(found, settings={**found.settings, **code})


def settings_of(pipeline: Pipeline) -> dict[str, Any]:
    """The settings of Inductor, with the functions that they name; kernels are to be generated."""
    hook = ["def change(gm):", *(f"    {line}" for line in pipeline.call or ["pass"]),
            "def hook(graph):", "    change(graph.owning_module)"]  # fmt: skip
    names: dict[str, Any] = {"__name__": "settings"}  # Inductor asks functions for their module
    exec("\n".join(["import torch", *pipeline.definitions, *hook]), names)  # noqa: S102 - our own text
    made = {name: eval(repr(value), names) if isinstance(value, Code) else value  # noqa: S307 - our own text
            for name, value in pipeline.settings.items()}  # fmt: skip
    return {name: value for name, value in made.items() if name not in EAGER_KERNELS}


@contextlib.contextmanager
def watched(one: TorchSubject, seen: Seen) -> Iterator[None]:
    """Count the calls of the passes that order communication, and those that change anything."""
    sources = {"torch._inductor.comms:reorder_compute_and_comm_for_overlap"}
    if one.name != "compile" and not one.name.startswith("comms."):
        sources.add(one.source)
    with contextlib.ExitStack() as stack:
        for source in sources:
            path, _, name = source.partition(":")
            module = importlib.import_module(path)
            stack.enter_context(mock.patch.object(module, name, _counted(getattr(module, name), seen)))
        yield


def _counted(function: Callable[..., Any], seen: Seen) -> Callable[..., Any]:
    def call(given: Any, *args: Any, **kwargs: Any) -> Any:
        before = _order(given)
        made = function(given, *args, **kwargs)
        after = _order(made if isinstance(made, list) else given)
        seen.called += 1
        seen.acted += before != after
        return made

    return call


def _order(given: Any) -> list[str]:
    """The nodes of a graph or of the scheduler."""
    if isinstance(given, list):
        return [node.get_name() for node in given]
    graph = given.graph if isinstance(given, fx.GraphModule) else given
    return [str(node.target) for node in graph.nodes] if isinstance(graph, fx.Graph) else []


@contextlib.contextmanager
def planted_in(plant: str | None, device: torch.device, seen: Seen) -> Iterator[None]:
    """Let Inductor have a defect: a kernel does not store the last of its elements, or no wait is generated."""
    from torch._inductor import ir
    from torch._inductor.codegen.triton import TritonScheduling

    from tcverify.pytorch import kernels

    def unwaited(*_: Any, **__: Any) -> None:
        seen.planted += 1

    store: Any = TritonScheduling.define_kernel
    loops = kernels.Loops

    def cut_text(scheduling: Any, source: str, *args: Any, **kwargs: Any) -> Any:
        changed = re.sub(r"\bxindex < xnumel\b", "xindex < xnumel - 1", source)
        seen.planted += changed != source
        return store(scheduling, changed, *args, **kwargs)

    def cut_loops(body: Any, sizes: tuple[int, ...], reduced: tuple[int, ...]) -> Any:
        fewer = sizes if not sizes or sizes[0] < 2 else (sizes[0] - 1, *sizes[1:])
        seen.planted += fewer != sizes
        return loops(body, fewer, reduced)

    patches: dict[str, tuple[Any, str, Any]] = {
        "wait": (ir._WaitKernel, "create_wait", unwaited),
        "block": (TritonScheduling, "define_kernel", cut_text)
        if device.type == "cuda"
        else (kernels, "Loops", cut_loops),
    }
    with mock.patch.object(*patches[plant]) if plant in patches else contextlib.nullcontext():
        yield


def placed(gm: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """The functional copy of a rank's graph, which creates its tensors on a device."""
    module = functional_copy(gm)
    for node in module.graph.nodes:
        schema = schema_of(node.target) if node.op == "call_function" else None
        if schema is None or all(argument.name != "device" for argument in schema.arguments):
            continue
        if "device" in node.kwargs or not any("Tensor" in str(argument.type) for argument in schema.arguments):
            node.kwargs = {**node.kwargs, "device": device}
    module.recompile()
    return module


def compiled_calls(
    one: TorchSubject, program: Program, device: torch.device, pipeline: Pipeline, plant: str | None, seen: Seen
) -> list[Call]:
    """What stands for the graph of each rank: compiled, where the options say so."""
    from torch._inductor import metrics

    calls: list[Call] = []
    for rank in range(program.world_size):
        gm = program.graph_module(rank)
        module = placed(gm, device)
        if not is_compiled(pipeline.compiled_ranks, rank):
            calls.append(module)
            continue
        before = metrics.generated_kernel_count
        values = [value.to(device) for value in example_inputs(gm)]
        with groups_of(gm), watched(one, seen), planted_in(plant, device, seen):
            calls.append(compile_graph(module, values))
        seen.ranks += 1
        seen.kernels += metrics.generated_kernel_count - before
    if plant == "value":
        calls[0] = changed_result(calls[0], seen)
    if plant == "crash":
        calls[0] = lambda *_: os.kill(os.getpid(), signal.SIGSEGV)
    return calls


def changed_result(call: Call, seen: Seen) -> Call:
    """Code whose first floating-point result is another."""

    def changed(*inputs: torch.Tensor) -> Any:
        leaves, tree = pytree.tree_flatten(call(*inputs))
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel():
                leaves[number] = leaf * 1.5 + 1
                seen.planted += 1
                break
        return pytree.tree_unflatten(leaves, tree)

    return changed


# --------------------------------------------------------------------------------------------------------------- judging


@dataclass
class Outcome:
    """What became of a program.

    Attributes:
        status: "passed", "refuted" or "inconclusive".
        cause: one line: what differs and where, or why that is not known; findings with the same are counted once.
        detail: all that is known of it.
        program: as it is kept, of a finding: with the options that it needs.
        known: the folders in reports/pytorch of the defects that may explain it.
        on_cpu: whether the CPU's code shows a finding, too: then it does not lie in the code for the device.
    """

    number: int
    subject: str
    status: str = "passed"
    cause: str = ""
    detail: str = ""
    ranks: int = 0
    collectives: int = 0
    seconds: float = 0.0
    seen: Seen = field(default_factory=Seen)
    plant: str | None = None
    program: str = ""
    known: str = ""
    on_cpu: bool = False


def examine(
    number: int, one: TorchSubject, program: Program, device: torch.device, plant: str | None = None
) -> Outcome:
    """Compile a program, run it, and judge it."""
    outcome = Outcome(number, one.name, ranks=program.world_size, plant=plant)
    started = time.monotonic()
    try:
        _examine(outcome, one, program, device)
    except TcverifyError as error:
        outcome.status, outcome.cause = "inconclusive", short(f"{type(error).__name__}: {error}")
    outcome.seconds = time.monotonic() - started
    return outcome


def _examine(outcome: Outcome, one: TorchSubject, program: Program, device: torch.device) -> None:
    from torch._inductor.fx_passes import overlap_scheduling

    pipeline = pipeline_of(one, program)
    reference = Lockstep().run(program)
    if not reference.finished:
        raise Unsupported(f"the original does not finish: {reference.why}")
    original = [placed(program.graph_module(rank), device) for rank in range(program.world_size)]
    plant = outcome.plant
    with contextlib.ExitStack() as stack:
        for one_context in (effects_as("ordered" if pipeline.ordered else "declared"), undisturbed(overlap_scheduling),
                            comms_settings(pipeline), inductor({"size_asserts": True, **settings_of(pipeline)}),
                            triton_cache()):  # fmt: skip
            stack.enter_context(one_context)
        try:
            calls = compiled_calls(one, program, device, pipeline, plant, outcome.seen)
        except Exception as error:  # noqa: BLE001 - what Inductor raises is a finding
            _refuse_unsupported(error)
            _refuted(outcome, f"Inductor raises {_raised(error)}", traceback.format_exc())
            return
        for timing in TIMINGS:
            before = run_calls(program, original, device, timing, "eager")
            if not before.finished:
                raise Unsupported(f"the original does not finish on the device: {before.why}")
            outcome.collectives = sum(len(rank.calls) for rank in before.ranks)
            poison(device)
            try:
                found = judged(program, reference, before, run_calls(program, calls, device, timing))
            except RuntimeError as error:  # of a device: kernels fail some time after they have been started
                found = f"the code raises {short(f'{type(error).__name__}: {error}')}", traceback.format_exc()
            if found is None:
                continue
            if isinstance(found, Doubt):
                outcome.status, outcome.cause = "inconclusive", short(str(found))
                continue
            _refuted(outcome, found[0], f"timing {timing}\n{found[1]}")
            return


def with_fewer_options(
    outcome: Outcome, one: TorchSubject, program: Program, device: torch.device, seconds: float
) -> Program:
    """Leave out options as long as the finding stays the same, and time permits."""
    stop = time.monotonic() + seconds
    for name in program.options:
        fewer = replace(program, options={key: value for key, value in program.options.items() if key != name})
        if time.monotonic() > stop:
            break
        if examine(outcome.number, one, fewer, device).cause == outcome.cause:
            program = fewer
    return program


def place_finding(outcome: Outcome, one: TorchSubject, program: Program, device: torch.device) -> None:
    """See whether a finding is known, and whether it needs the device; one that is new keeps only the options that it needs."""
    outcome.known = known_as(program, outcome)
    again = examine(outcome.number, one, program, torch.device("cpu")) if device.type != "cpu" else outcome
    outcome.on_cpu = again.status == "refuted"
    if again is not outcome:
        outcome.detail += f"\non the CPU: {again.status} {again.cause}"
    usable = "CUDA error" not in outcome.cause  # after one, the process cannot use the device
    if usable and (not outcome.on_cpu or (again is outcome and not outcome.known)):
        program = with_fewer_options(outcome, one, program, device, SHRINKING)
    outcome.program = dumps(program)


#: Kinds that known defects may have that a finding of some cause shows: by how the cause begins.
SHOWS = {
    "wrong-": ("wrong-value", "wrong-alias", "async-race", "broken-order", "use-after-free", "reordered-collectives"),
    "ranks ": ("deadlock", "collective-mismatch", "changed-effects", "reordered-collectives"),
    "the code raises": ("pass-raised", "rewritten-raises"),
}

#: Subjects that are part of every compilation.
ALWAYS = (
    "torch:compile",
    "torch:joint_graph_passes",
    "torch:post_grad_passes",
    "torch:reinplace",
)


def known_as(program: Program, outcome: Outcome) -> str:
    """The defects in reports/pytorch that may explain a finding.

    One lies in a function that raises, or each shows in a part of the program, with the options that it needs.
    """
    pattern = ProgramPattern(program)
    told = pytree.tree_leaves(list(program.options.values()))
    subjects = {*ALWAYS, f"torch:{outcome.subject}", *(f"torch:comms.{one}" for one in told)}
    kinds = next((kinds for cause, kinds in SHOWS.items() if outcome.cause.startswith(cause)), ())
    found = []
    for finding, case in known_defects():
        path, _, function = finding.cause.partition(":")
        if f'{path}"' in outcome.detail and f"in {function.rpartition('.')[2]}\n" in outcome.detail:
            return finding.folder.name
        if case is None or finding.subject not in subjects or finding.kind not in kinds:
            continue
        same = program.options.items() >= case.options.items()
        if same and ProgramPattern(case).within(pattern):
            found.append(finding.folder.name)
    return ", ".join(found)


@functools.cache
def known_defects() -> list[tuple[TorchFinding, Program | None]]:
    """Defects of this version, each with the program that shows it, if there is one."""
    found = []
    for one in read_findings(Path(__file__).parents[1] / "reports" / "pytorch"):
        if one.shows_in(torch.__version__.split("+")[0]) is not False:
            case = one.counterexample
            found.append((one, read_counterexample(case).program if case else None))
    return found


def judged(program: Program, reference: Run, before: Run, after: Run) -> tuple[str, str] | Doubt | None:
    """What is wrong with compiled code, as a cause and in detail; or what leaves that open."""
    if after.error is not None and "OutOfMemoryError" in after.why:
        raise Unsupported("the device has too little memory")
    if after.error is not None:
        return f"the code raises {short(after.error.error.message if after.error.error else '')}", after.why
    if not after.finished:
        return ("ranks wait forever" if after.hang else "ranks disagree on a collective"), after.why
    comparison: Comparison = Lockstep().compare_runs(before, after, reference)
    said = native_differences(comparison, lambda: rounding_noise(program, reference), lambda: range_used(program))
    for one in said:
        if not isinstance(one, Doubt):
            return f"{one.kind}: {re.sub(r'[0-9]+', 'N', one.title)}", f"{one.title}\n{one.detail}"
    for expected, actual in zip(before.ranks, after.ranks, strict=True):
        other = other_layout(expected, actual)
        if other is not None:
            return f"wrong-layout: {other[0]}", f"on rank {actual.rank}, {other[1]}"
    return next((one for one in said if isinstance(one, Doubt)), None)


def other_layout(expected: RankResult, actual: RankResult) -> tuple[str, str] | None:
    """How results of equal shape lie in memory otherwise: their strides, or the inputs that they share memory with."""
    for number, (one, other) in enumerate(zip(expected.outputs, actual.outputs, strict=True)):
        if not isinstance(one, torch.Tensor) or not one.numel():
            continue
        strides = [[s for n, s in zip(v.shape, v.stride(), strict=True) if n > 1] for v in (one, other)]
        if strides[0] != strides[1]:
            return "an output has another stride", f"output {number} has stride {strides[1]} instead of {strides[0]}"
        shared = [
            [name for name, given in zip(rank.input_names, rank.inputs, strict=True) if _memory(given) == _memory(v)]
            for v, rank in ((one, expected), (other, actual))
        ]
        if shared[0] != shared[1]:
            what = f"output {number} shares memory with the inputs {shared[1]} instead of {shared[0]}"
            return "an output shares memory with other inputs", what
    return None


def _memory(value: torch.Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def _refuted(outcome: Outcome, cause: str, detail: str) -> None:
    outcome.status, outcome.cause, outcome.detail = "refuted", cause, detail


def _refuse_unsupported(error: BaseException | None) -> None:
    """Raise what this project does not support, if it is behind an error of Inductor."""
    if error is not None and "Unsupported:" in f"{type(error).__name__}: {error}"[:400]:
        raise Unsupported(short(str(error)))


def _raised(error: BaseException) -> str:
    """The exception and the function of torch that raised it, on one line."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if "/torch/" in one.filename]
    where = f" in torch/{frames[-1].filename.rpartition('/torch/')[2]}:{frames[-1].name}" if frames else ""
    return f"{short(f'{type(error).__name__}: {error}')}{where}"


def short(text: str) -> str:
    return " ".join(text.split())[:160]


def comms_settings(pipeline: Pipeline) -> contextlib.AbstractContextManager[Any]:
    """The settings of `torch._inductor.config_comms`."""
    if not pipeline.comms:
        return contextlib.nullcontext()
    from torch._inductor import config_comms

    found: contextlib.AbstractContextManager[Any] = config_comms.patch(dict(pipeline.comms))  # type: ignore[attr-defined]
    return found


def triton_cache() -> contextlib.AbstractContextManager[Any]:
    """Keep compiled kernels and launchers between programs: they are known by their source."""
    return mock.patch.dict(os.environ, TRITON_CACHE_DIR=os.environ[TRITON_CACHE])


def poison(device: torch.device) -> None:
    """Let memory that is allocated next hold NaN, not what an earlier run has computed."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        small = [torch.full((1 << 17,), float("nan"), device=device) for _ in range(32)]
        large = [torch.full((1 << 22,), float("nan"), device=device) for _ in range(8)]
        del small, large
