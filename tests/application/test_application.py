"""What applying a pass observes, in this process and in the guarded worker."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import fx

from tcverify.application import Guarded, InProcess, Pair, subject_of
from tcverify.application import guarded as guard
from tcverify.application.loading import importable_target, load_pass, prepare_pass
from tcverify.application.pair import PassFailure
from tcverify.application.side_effects import watch_global_state
from tcverify.errors import PassLoadError, Unsupported
from tcverify.passes import Identity
from tcverify.program import InputSpec, Mesh, dumps, spmd_program
from tests.support.programs import reduce_then_norm

PASSES = """
import os, signal, sys, time
import torch
from tcverify import Contract, Unsupported

def identity(gm): return gm
def in_place(gm): return None

def double(gm):
    for node in list(gm.graph.nodes):
        if node.name == "all_reduce":
            with gm.graph.inserting_after(node):
                twice = gm.graph.call_function(torch.ops.aten.mul.Tensor, (node, 2.0))
            twice.meta["val"] = node.meta["val"].clone()
            node.replace_all_uses_with(twice)
            twice.args = (node, 2.0)
    return gm

def raises(gm): raise ValueError("no good")
def exits(gm): sys.exit(3)
def declines(gm): raise Unsupported("only even ranks")
def nonsense(gm): return 42
def dies(gm): os._exit(7)

FORKED = []
def forks_once(gm):
    if FORKED: return gm
    FORKED.append(os.fork())
    return double(gm)

def crashes(gm): os.kill(os.getpid(), signal.SIGSEGV)

def spins_here(gm):
    while True:
        pass

def with_inputs(gm, example_inputs):
    assert [tuple(v.shape) for v in example_inputs] == [(4, 8), (8,)]
    return double(gm)

def foreign_function(gm):
    for node in list(gm.graph.nodes):
        if node.name == "all_reduce":
            with gm.graph.inserting_after(node):
                same = gm.graph.call_function(torch.add, (node, 0.0))
            node.replace_all_uses_with(same)
            same.args = (node, 0.0)
    return gm

def hash_order(gm):
    names = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu"]
    factor = sum(names.index(name) * 12.0**i for i, name in enumerate(set(names)))
    for node in list(gm.graph.nodes):
        if node.name == "all_reduce":
            with gm.graph.inserting_after(node):
                same = gm.graph.call_function(torch.ops.aten.clamp.default, (node, -100.0 * factor))
            same.meta["val"] = node.meta["val"].clone()
            node.replace_all_uses_with(same)
            same.args = (node, -100.0 * factor)
    return gm

ONCE = []
def only_once(gm):
    ONCE.append(1)
    return double(gm) if len(ONCE) == 1 else gm

DTYPES = set()
def knows_dtypes(gm):
    DTYPES.add(next(iter(gm.graph.nodes)).meta["val"].dtype)
    return double(gm) if len(DTYPES) > 1 else gm

def numbers_nodes(gm):
    DTYPES.add(next(iter(gm.graph.nodes)).meta["val"].dtype)
    for node in list(gm.graph.nodes):
        if node.name == "all_reduce" and len(DTYPES) > 1:
            node.name = "all_reduce_second"
    return gm

def stores_costs(gm):
    DTYPES.add(next(iter(gm.graph.nodes)).meta["val"].dtype)
    for node in gm.graph.nodes:
        if node.op == "call_function":
            node.meta["cost_s"] = 1e-6 * len(DTYPES)
    return gm

calls = []
def remembers(gm):
    calls.append(1)
    return double(gm) if len(calls) > 2 else gm

class Configured:
    contract = Contract(idempotent=True)
    name = "configured"
    def __init__(self, factor="1"): self.factor = float(factor); self.rewrites = {}
    def __call__(self, gm):
        self.rewrites = {"scale": 1}
        return double(gm) if self.factor == 2 else gm

def not_a_pass(a, b, c): pass
number = 3
"""


@pytest.fixture(scope="module")
def passes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("passes") / "user_passes.py"
    path.write_text(PASSES)
    return path


@pytest.fixture
def guarded(passes: Path) -> Iterator[Callable[..., Pair]]:
    """Applies a pass of the file above in a worker."""
    subjects: list[Guarded] = []

    def apply(name: str, *, deep: bool = False, timeout: float = 20.0) -> Pair:
        subjects.append(Guarded(f"{passes}:{name}", timeout=timeout))
        return subjects[-1].apply(reduce_then_norm(), deep=deep)

    yield apply
    for subject in subjects:
        subject.close()


def test_identity_changes_nothing(guarded: Callable[..., Pair]) -> None:
    pair = guarded("identity")
    assert not pair.changed
    assert pair.rewritten is not None
    assert dumps(pair.rewritten) != ""
    assert pair.defects == []


def test_returning_none_means_in_place(guarded: Callable[..., Pair]) -> None:
    assert not guarded("in_place").changed


def test_a_rewrite_comes_back(guarded: Callable[..., Pair]) -> None:
    pair = guarded("double")
    assert pair.changed
    assert pair.rewritten is not None
    assert "mul" in str(pair.rewritten.graphs[0])
    assert len(pair.rewritten.graphs) == 1  # equal up to the rank: stored once


def test_example_inputs_are_given_to_passes_that_want_them(guarded: Callable[..., Pair]) -> None:
    assert guarded("with_inputs").changed


@pytest.mark.parametrize(("name", "message"), [("raises", "ValueError: no good"), ("exits", "SystemExit: 3")])
def test_a_pass_that_raises(guarded: Callable[..., Pair], name: str, message: str) -> None:
    failure = guarded(name).failure
    assert failure is not None
    assert (failure.kind, failure.message, failure.rank) == ("pass-raised", message, 0)
    assert "user_passes.py" in failure.detail


def test_a_pass_that_declines(guarded: Callable[..., Pair]) -> None:
    pair = guarded("declines")
    assert pair.declined == "only even ranks"
    assert pair.failure is None


def test_nonsense_is_a_defect(guarded: Callable[..., Pair]) -> None:
    pair = guarded("nonsense")
    assert [d.aspect for d in pair.defects] == ["return"]
    assert "int 42" in pair.defects[0].message


def test_the_child_of_a_pass_that_forks_does_not_answer(passes: Path) -> None:
    with Guarded(f"{passes}:forks_once") as subject:
        assert [subject.apply(reduce_then_norm()).changed for _ in range(3)] == [True, False, False]


def test_the_answer_that_nobody_waited_for_is_not_taken_for_the_next(passes: Path) -> None:
    with Guarded(f"{passes}:forks_once") as subject:
        before = subject.pids
        subject.start(reduce_then_norm())
        assert not subject.apply(reduce_then_norm()).changed  # it changes the first program alone
        assert subject.pids == before


def test_a_pass_that_hangs_without_anybody_waiting_is_replaced(passes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "UNWANTED_TIMEOUT", 0.2)
    with Guarded(f"{passes}:spins_here", timeout=1.0) as subject:
        before = subject.pids
        subject.start(reduce_then_norm())
        failure = subject.apply(reduce_then_norm()).failure
        assert failure is not None
        assert failure.kind == "pass-timeout"
        assert subject.pids != before


@pytest.mark.parametrize(("name", "how"), [("dies", "exit code 7"), ("crashes", "signal SIGSEGV")])
def test_a_pass_that_dies_is_a_failure_and_the_next_program_is_verified(passes: Path, name: str, how: str) -> None:
    with Guarded(f"{passes}:{name}") as subject:
        for _ in range(2):
            failure = subject.apply(reduce_then_norm()).failure
            assert failure is not None
            assert failure.kind == "pass-died"
            assert how in failure.message


def test_a_pass_that_hangs_is_stopped_and_located(guarded: Callable[..., Pair]) -> None:
    failure = guarded("spins_here", timeout=1.0).failure
    assert failure is not None
    assert failure.kind == "pass-timeout"
    assert "spins_here" in failure.detail


def test_foreign_functions_are_judged_where_they_live(guarded: Callable[..., Pair]) -> None:
    pair = guarded("foreign_function")
    assert pair.foreign is not None
    assert "'add' calls foreign::torch" in pair.foreign.why
    assert pair.foreign.judged is not None
    assert pair.foreign.judged.rewritten.finished
    assert max(d.difference for d in pair.foreign.judged.deltas) == 0.0


def test_dependence_on_hash_order_is_seen(guarded: Callable[..., Pair]) -> None:
    # Two hash seeds agree on the order of twelve strings once in 479,001,600 pairs.
    (defect,) = guarded("hash_order", deep=True).defects
    assert defect.aspect == "hash-order"
    assert ": the first one has clamp_default = clamp(all_reduce, -" in defect.message


def test_dependence_on_earlier_calls_is_seen(guarded: Callable[..., Pair]) -> None:
    (defect,) = guarded("remembers", deep=True).defects
    assert defect.aspect == "unrepeatable"
    first, second = "rms_norm = rms_norm(all_reduce, gain, 1e-06)", "mul_tensor = mul.Tensor(all_reduce, 2.0)"
    assert defect.message.endswith(f"results: the first one has {first} where the second one has {second}")


@pytest.mark.parametrize("deep_before", [False, True])
def test_dependence_on_earlier_programs_is_not_taken_for_one_on_hash_order(passes: Path, deep_before: bool) -> None:
    with Guarded(f"{passes}:knows_dtypes") as subject:
        assert subject.apply(reduce_then_norm(), deep=deep_before).defects == []
        subject.apply(reduce_then_norm(dtype=torch.bfloat16))
        (defect,) = subject.apply(reduce_then_norm(), deep=True).defects
    assert (defect.aspect, "applied to before: the first one has mul_tensor" in defect.message) == (
        "unrepeatable",
        True,
    )


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("numbers_nodes", ": the first one names all_reduce_second what the second one names all_reduce"),
        (
            "stores_costs",
            ": they differ in meta['cost_s'] of all_reduce: 2e-06 in the first one, 1e-06 in the second one",
        ),
    ],
)
def test_results_that_differ_in_names_or_metadata_alone_are_told_apart(passes: Path, name: str, told: str) -> None:
    with Guarded(f"{passes}:{name}") as subject:
        for dtype in (torch.float32, torch.bfloat16):
            subject.apply(reduce_then_norm(dtype=dtype))
        (defect,) = subject.apply(reduce_then_norm(), deep=True).defects
    assert defect.message == f"its result depends on the programs that it was applied to before{told}"


def test_a_failure_behind_other_programs_is_told_as_one(passes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Guarded(f"{passes}:identity") as subject:
        failed = Pair(reduce_then_norm(), failure=PassFailure("pass-raised", "raised ValueError: too many"))
        monkeypatch.setattr(subject._second(), "answer", lambda *_: failed)  # of the worker that has had other programs
        (defect,) = subject.apply(reduce_then_norm(), deep=True).defects
    assert defect.aspect == "unrepeatable"
    assert defect.message.endswith("it was applied to before: behind others it raised ValueError: too many")


def test_what_only_the_first_application_does_is_found_in_a_new_process(passes: Path) -> None:
    with Guarded(f"{passes}:only_once") as subject:
        subject.apply(reduce_then_norm())
        (defect,) = subject.apply(reduce_then_norm(), deep=True).defects
    assert (defect.aspect, "two applications" in defect.message) == ("unrepeatable", True)


def test_a_pass_that_doubles_again_has_a_second_application(guarded: Callable[..., Pair]) -> None:
    pair = guarded("double", deep=True)
    assert pair.again is not None
    assert pair.defects == []


def test_idempotence_is_asked_of_those_who_promise_it(passes: Path) -> None:
    with Guarded(f"{passes}:Configured", {"factor": "2"}) as subject:
        pair = subject.apply(reduce_then_norm(), deep=True)
    assert [d.aspect for d in pair.defects] == ["not-idempotent"]


def test_a_class_is_made_with_its_options_and_tells_about_itself(passes: Path) -> None:
    with Guarded(f"{passes}:Configured", {"factor": "2"}) as subject:
        assert subject.facts.name == "configured"
        assert subject.contract.idempotent
        pair = subject.apply(reduce_then_norm())
    assert pair.changed
    assert pair.rewrites == {"scale": 2}  # one per rank


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("no_such_module_anywhere:X", "there is no module"),
        ("os:no_such_pass", "os has no 'no_such_pass'"),
        ("os", "is not a pass"),
        ("missing.py:f", "there is no file"),
        ("{file}:doubl", "did you mean 'double'?"),
        ("{file}:not_a_pass", "not that of a pass"),
        ("{file}:number", "cannot be called"),
    ],
)
def test_what_cannot_be_loaded_says_why(passes: Path, target: str, words: str) -> None:
    with pytest.raises(PassLoadError) as error:
        load_pass(target.format(file=passes))
    assert words in str(error.value)


def test_an_unknown_option_says_so(passes: Path) -> None:
    with pytest.raises(PassLoadError, match="colour"):
        load_pass(f"{passes}:Configured", {"colour": "red"})


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import nothing_like_this", "nothing_like_this"),
        ("def f(:", "SyntaxError"),
        ("raise RuntimeError('at import')", "at import"),
        ("import sys; sys.exit(1)", "ends the interpreter"),
    ],
)
def test_a_file_that_cannot_be_imported(tmp_path: Path, source: str, words: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(source)
    with pytest.raises(PassLoadError) as error:
        load_pass(f"{path}:f")
    assert words in str(error.value)


def test_a_file_whose_import_kills_the_process(tmp_path: Path) -> None:
    path = tmp_path / "deadly.py"
    path.write_text("import os; os._exit(9)")
    with pytest.raises(PassLoadError, match="exit code 9"):
        Guarded(f"{path}:f")


def test_closures_and_instances_run_in_process() -> None:
    def local(gm: fx.GraphModule) -> fx.GraphModule:
        return gm

    assert isinstance(subject_of(local), InProcess)
    assert importable_target(local) is None


def test_importable_classes_run_guarded() -> None:
    subject = subject_of(Identity)
    try:
        assert isinstance(subject, Guarded)
    finally:
        subject.close()


def _apply_here(call: Callable[[fx.GraphModule], object], *, deep: bool = False) -> Pair:
    return InProcess(prepare_pass(call, "", {})).apply(reduce_then_norm(), deep=deep)


def test_use_before_definition_is_a_lint_defect() -> None:
    def swap(gm: fx.GraphModule) -> None:
        nodes = {n.name: n for n in gm.graph.nodes}
        nodes["rms_norm"].append(nodes["all_reduce"])

    pair = _apply_here(swap)
    assert [d.aspect for d in pair.defects] == ["lint"]
    assert pair.rewritten is None
    assert "rms_norm" in pair.listing


def test_a_node_of_another_graph_is_a_lint_defect() -> None:
    def steal(gm: fx.GraphModule) -> None:
        other = fx.Graph().placeholder("stolen")
        node = next(n for n in gm.graph.nodes if n.name == "rms_norm")
        node.args = (other, *node.args[1:])

    assert [d.aspect for d in _apply_here(steal).defects] == ["lint"]


def test_a_node_behind_the_output_is_a_lint_defect() -> None:
    def forget_where(gm: fx.GraphModule) -> None:
        gm.graph.call_function(torch.ops.aten.neg.default, (next(iter(gm.graph.nodes)),))

    (defect,) = _apply_here(forget_where).defects
    assert (defect.aspect, defect.message) == (
        "lint",
        "node 'neg_default' is after the output, where it never runs",
    )


@pytest.mark.parametrize("error", [Unsupported("been here"), ValueError("been here")])
def test_a_pass_that_fails_on_its_own_result_breaks_it_unless_it_declines(error: Exception) -> None:
    def once(gm: fx.GraphModule) -> None:
        reduced = next(n for n in gm.graph.nodes if n.name == "all_reduce")
        if any(n.name == "mul_tensor" for n in gm.graph.nodes):
            raise error
        with gm.graph.inserting_after(reduced):
            twice = gm.graph.call_function(torch.ops.aten.mul.Tensor, (reduced, 1.0))
        twice.meta["val"] = reduced.meta["val"].clone()
        reduced.replace_all_uses_with(twice, delete_user_cb=lambda user: user is not twice)

    found = [(d.aspect, d.message) for d in _apply_here(once, deep=True).defects]
    failed = [("second-application", "applied to its own result, it fails: ValueError: been here")]
    assert found == ([] if isinstance(error, Unsupported) else failed)


def test_metadata_alone_make_a_rewritten_program_too() -> None:
    def annotate(gm: fx.GraphModule) -> None:
        reduced = next(n for n in gm.graph.nodes if n.name == "all_reduce")
        reduced.meta["val"] = reduced.meta["val"].new_empty((1, 1))

    pair = _apply_here(annotate)
    assert not pair.changed
    assert pair.rewritten is not None
    assert pair.rewritten is not pair.original
    assert _apply_here(lambda gm: None).rewritten is not None


def test_global_state_that_a_pass_changes_is_told_and_put_back() -> None:
    before = torch.get_default_dtype()
    with watch_global_state() as changed:
        torch.set_default_dtype(torch.float64)
    assert torch.get_default_dtype() is before
    assert str(changed) == "changed the default dtype from torch.float32 to torch.float64"


def test_a_dropped_output_changes_the_signature() -> None:
    def drop(gm: fx.GraphModule) -> None:
        output = next(iter(reversed(gm.graph.nodes)))
        output.args = ((output.args[0][0],),)

    assert [d.aspect for d in _apply_here(drop).defects] == ["signature"]


def test_a_list_in_place_of_a_tuple_changes_the_signature() -> None:
    def returns_a_list(gm: fx.GraphModule) -> None:
        output = next(node for node in gm.graph.nodes if node.op == "output")
        output.args = (list(output.args[0]),)

    assert [d.aspect for d in _apply_here(returns_a_list).defects] == ["signature"]


def test_an_erased_placeholder_changes_the_signature() -> None:
    def erase(gm: fx.GraphModule) -> None:
        for node in list(gm.graph.nodes):
            if node.name == "rms_norm":
                node.replace_all_uses_with(node.args[0])
                gm.graph.erase_node(node)
        gm.graph.erase_node(next(n for n in gm.graph.nodes if n.name == "gain"))

    assert [d.aspect for d in _apply_here(erase).defects] == ["signature"]


def test_mutating_the_input_beside_returning_a_new_graph_is_a_defect() -> None:
    def both(gm: fx.GraphModule) -> fx.GraphModule:
        new = fx.Graph()
        new.output(new.graph_copy(gm.graph, {}))
        node = next(n for n in gm.graph.nodes if n.name == "rms_norm")
        node.args = (*node.args[:2], 0.5)
        return fx.GraphModule({}, new)

    assert [d.aspect for d in _apply_here(both).defects] == ["input-mutated"]


def test_a_new_graph_that_leaves_the_input_alone_is_fine() -> None:
    def copy(gm: fx.GraphModule) -> fx.GraphModule:
        new = fx.Graph()
        new.output(new.graph_copy(gm.graph, {}))
        return fx.GraphModule({}, new)

    pair = _apply_here(copy)
    assert pair.defects == []
    assert not pair.changed


def test_passresult_is_accepted() -> None:
    from torch.fx.passes.infra.pass_base import PassResult

    assert _apply_here(lambda gm: PassResult(gm, False)).defects == []


def test_a_submodule_is_judged_in_this_process() -> None:
    def wrap(gm: fx.GraphModule) -> None:
        gm.add_submodule("same", torch.nn.Identity())
        node = next(n for n in gm.graph.nodes if n.name == "all_reduce")
        with gm.graph.inserting_after(node):
            same = gm.graph.call_module("same", (node,))
        node.replace_all_uses_with(same)
        same.args = (node,)

    pair = _apply_here(wrap)
    assert pair.foreign is not None
    assert pair.foreign.judged is not None
    assert pair.foreign.judged.rewritten.finished


def test_an_in_process_pass_may_decline() -> None:
    def declines(gm: fx.GraphModule) -> None:
        raise Unsupported("not today")

    assert _apply_here(declines).declined == "not today"


def test_the_worker_survives_ctrl_c(passes: Path) -> None:
    with Guarded(f"{passes}:identity") as subject:
        worker = subject._worker
        assert worker is not None
        pid = worker._process.pid
        assert pid is not None
        os.kill(pid, signal.SIGINT)
        assert subject.apply(reduce_then_norm()).failure is None


def test_a_pass_that_stops_its_process_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "stops.py"
    path.write_text("import os, signal\ndef stops(gm): os.kill(os.getpid(), signal.SIGSTOP)\n")
    with Guarded(f"{path}:stops", timeout=1.0) as subject:
        failure = subject.apply(reduce_then_norm()).failure
    assert failure is not None
    assert failure.kind == "pass-timeout"


def test_a_pass_may_name_ops_that_no_program_has_had_yet(tmp_path: Path) -> None:
    source = "import torch\ndef names_op(gm):\n    assert torch.ops.tensor_cast.all_to_all.default\n    return gm\n"
    (tmp_path / "names.py").write_text(source)
    only_input = spmd_program(Mesh.grid({"tp": 2}), [InputSpec("x", (2, 2))], lambda b: b.input("x"))
    with Guarded(f"{tmp_path}/names.py:names_op") as subject:
        assert subject.apply(only_input).failure is None
