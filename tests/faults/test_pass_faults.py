"""What becomes of passes that misbehave: they are never passed, they are stopped in time, and nothing of theirs is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tcverify import verify
from tcverify.application import Guarded, InProcess
from tcverify.application import guarded as guard
from tcverify.application.loading import prepare_pass
from tcverify.application.side_effects import SETTINGS
from tcverify.system import resident_bytes, scratch
from tcverify.verification.verifier import Verdict
from tests.faults import passes
from tests.faults.processes import ROOT, alive, left, wait_until
from tests.support.programs import reduce_then_norm


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Guarded]]:
    """A pass of `passes` in a process of its own, whose current directory is `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    Guarded("tcverify.passes:Identity").close()  # imports of the fork server may leave files of their own (torch 2.9)
    before = set(Path(scratch.directory()).iterdir())
    subjects: list[Guarded] = []

    def make(name: str, timeout: float = 20.0) -> Guarded:
        subjects.append(Guarded(f"tests.faults.passes:{name}", timeout=timeout))
        return subjects[-1]

    yield make
    for subject in subjects:
        subject.close()
    assert {path for path in Path(scratch.directory()).iterdir() if not path.name.startswith("pymp-")} <= before


def here(pass_: Callable[..., None]) -> InProcess:
    """A pass in this process, although it could be imported."""
    return InProcess(prepare_pass(pass_, "", {}))


def judge(subject: Guarded) -> Verdict:
    return verify(subject, reduce_then_norm())


def kinds(verdict: Verdict) -> list[str]:
    return [finding.kind for finding in verdict.findings]


# --------------------------------------------------------------------------------------------- processes, time and memory


@pytest.mark.fault(
    "a pass that recurses without end", "`pass-raised`, or `pass-died` where the stack is at its end; the run continues"
)
@pytest.mark.parametrize("name", ["recurses", "recurses_in_c"])
def test_a_pass_that_recurses_is_refuted(guarded: Callable[..., Guarded], name: str, tmp_path: Path) -> None:
    (finding,) = judge(guarded(name)).findings
    assert finding.kind in ("pass-raised", "pass-died")
    assert "RecursionError" in finding.title or "SIGSEGV" in finding.title
    assert not list(tmp_path.glob("core*"))


@pytest.mark.fault("a pass that closes every file of its process", "`pass-died`; the next program gets a new process")
def test_a_pass_that_closes_its_files_is_refuted(guarded: Callable[..., Guarded]) -> None:
    subject = guarded("closes_its_files")
    assert kinds(judge(subject)) == ["pass-died"]
    assert kinds(judge(subject)) == ["pass-died"]


@pytest.mark.fault(
    "a pass that forks, ends, and leaves its child",
    "`pass-died`, at once; the child is killed, whether it holds the pipe open or not",
)
def test_what_a_pass_has_forked_ends_with_it(guarded: Callable[..., Guarded], tmp_path: Path) -> None:
    before = time.monotonic()
    verdict = judge(guarded("forks_and_stays", timeout=300))
    assert kinds(verdict) == ["pass-died"]
    assert "exit code 3" in verdict.findings[0].title
    assert time.monotonic() - before < 200  # not at the time-out
    children = [int(pid) for pid in (tmp_path / "forked").read_text().split()]
    assert children
    wait_until(lambda: not any(alive(pid) for pid in children))


@pytest.mark.fault(
    "a pass that spends ages in one call of C", "`pass-timeout` after `--pass-timeout`, with the frame it stands in"
)
def test_a_pass_that_holds_the_interpreter_is_stopped(guarded: Callable[..., Guarded]) -> None:
    subject = guarded("holds_the_interpreter", timeout=0.5)
    (worker,) = subject.pids
    (finding,) = judge(subject).findings
    assert finding.kind == "pass-timeout"
    assert "holds_the_interpreter" in finding.detail
    assert not alive(worker)


@pytest.mark.fault(
    "a pass that takes memory without bound",
    "its process may take half of the machine, and 16 GiB at most; then the allocation fails: `pass-raised`",
)
def test_a_pass_that_fills_memory_is_refuted(guarded: Callable[..., Guarded], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MEMORY_LIMIT", 512 << 20)
    before = resident_bytes()
    (finding,) = judge(guarded("fills_memory")).findings
    assert finding.kind == "pass-raised"
    assert "MemoryError" in finding.title
    assert resident_bytes() - before < 256 << 20


@pytest.mark.fault(
    "a pass that leaks memory",
    "its process is replaced when it has grown by 1 GiB; the program is inconclusive (`pass-memory`), the run continues",
)
def test_a_process_that_has_grown_is_replaced(guarded: Callable[..., Guarded], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "GROWTH_LIMIT", 120 << 20)  # of 96 MiB a program, on two ranks
    subject = guarded("leaks")
    first = subject.pids
    verdicts = [judge(subject) for _ in range(3)]
    assert [verdict.status for verdict in verdicts] == ["passed", "inconclusive", "passed"]
    (doubt,) = verdicts[1].doubts
    assert doubt.reason == "pass-memory"
    assert "after 2 programs" in doubt.detail
    assert set(subject.pids).isdisjoint(first)


PARENT = """
from tcverify.application import Guarded
from tests.support.programs import reduce_then_norm
subject = Guarded("tests.faults.passes:{name}", timeout=300)
print(*subject.pids, flush=True)
subject.apply(reduce_then_norm())
"""


@pytest.mark.slow
@pytest.mark.fault(
    "the run is killed (−9) while a pass holds the interpreter", "the pass's process is killed by the system"
)
def test_a_pass_that_holds_the_interpreter_dies_with_the_run(tmp_path: Path, place: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(name="holds_the_interpreter")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(place)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        wait_until((tmp_path / "running").exists)
        assert left(place)
        process.kill()
    wait_until(lambda: not alive(worker))
    wait_until(lambda: left(place) == [])


# ---------------------------------------------------------------------------------------------------- torch's global state

CHANGES = {
    "sets_dtype": "the default dtype from torch.float32 to torch.float16",
    "sets_device": "the default device from None to meta",
    "sets_grad_mode": "grad mode from True to False",
    "sets_threads": "the number of threads from",
    "sets_determinism": "the mode of deterministic algorithms from 0 to 2",
    "sets_autocast": "autocast on the CPU from False to True",
    "sets_anomaly_detection": "anomaly detection from False to True",
    "seeds_torch": "the seed of torch's random numbers",
    "seeds_python": "the seed of Python's random numbers",
    "enters_a_mode": "modes of dispatch",
    "patches_torch": "torch.relu",
    "patches_fx": "torch.fx.Graph.lint",
}


@pytest.mark.fault(
    "a pass that changes torch's global state (default dtype and device, seeds, threads, grad mode, autocast, determinism, "
    "anomaly detection, modes) or replaces functions of torch",
    "`impure-pass`, which names what it changed; it is put back before the next rank's check",
)
@pytest.mark.parametrize("name", CHANGES)
def test_what_a_pass_changes_beside_its_graph_is_named_and_put_back(name: str) -> None:
    change = getattr(passes, name)
    relu, lint = torch.relu, torch.fx.Graph.lint
    before = {what: setting.read() for what, setting in SETTINGS.items()}
    verdict = verify(here(change), reduce_then_norm())
    assert (verdict.status, kinds(verdict)) == ("refuted", ["impure-pass"])
    assert verdict.findings[0].title == "the pass leaves torch's global state changed"
    assert verdict.findings[0].detail.startswith(f"it changed {CHANGES[name]}")
    assert [what for what, setting in SETTINGS.items() if not setting.same(before[what], setting.read())] == []
    assert (torch.relu, torch.fx.Graph.lint) == (relu, lint)


@pytest.mark.parametrize("name", ["does_nothing", "draws_numbers", "sets_and_restores"])
def test_what_a_pass_puts_back_itself_is_not_held_against_it(name: str) -> None:
    change = getattr(passes, name)
    assert verify(here(change), reduce_then_norm(), deep=True).status == "passed"


def test_in_a_process_of_its_own_too(guarded: Callable[..., Guarded]) -> None:
    subject = guarded("sets_dtype")
    for _ in range(2):  # named again: it has been put back
        (finding,) = judge(subject).findings
        assert finding.detail == "it changed the default dtype from torch.float32 to torch.float16"


def test_what_torch_itself_puts_in_place_is_not_held_against_a_pass(guarded: Callable[..., Guarded]) -> None:
    """TorchDynamo wraps `torch.nn.Module.__init__` when it first runs in a process."""
    assert judge(guarded("runs_dynamo")).status == "passed"


def test_of_a_pipeline_the_stage_is_named() -> None:
    stages = [f"tests.faults.passes:{name}" for name in ("sets_dtype", "does_nothing")]
    (finding,) = verify(stages, reduce_then_norm()).findings
    assert finding.data["stage"] == "sets_dtype"


@pytest.mark.fault(
    "a pass that closes the process group of its process",
    "`impure-pass`, which says that it cannot be put back; the group that confirms is in processes of its own",
)
def test_a_pass_that_closes_the_process_group_is_refuted() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        verdict = verify(here(passes.closes_the_group), reduce_then_norm())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    (finding,) = verdict.findings
    assert finding.detail == "it changed the process group; could not be restored: the process group"


def test_workers_end_at_a_signal_to_their_group(guarded: Callable[..., Guarded]) -> None:
    """What a pass starts is in its process's group, and our own process is not."""
    (worker,) = guarded("does_nothing").pids
    assert os.getpgid(worker) == worker != os.getpgid(0)
    os.killpg(worker, signal.SIGKILL)
    wait_until(lambda: not alive(worker))
