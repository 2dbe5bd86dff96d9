"""What `tests.warm` starts behaves as an interpreter of its own does: each command here is run both ways, the second at night."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import warm

ROOT = Path(__file__).parents[2]

#: Both ways to run a command.
WAYS = {"warm": warm.start, "interpreter": warm.interpreter}

SAYS = """
import os, sys, signal
print(__name__, sys.argv, os.getcwd(), os.environ["SAID"], sorted(os.environ) == sys.argv[1:] or len(os.environ))
print(os.getsid(0) == os.getpid(), sys.stdin.read() == "", signal.getsignal(signal.SIGINT) is signal.default_int_handler)
print("error", file=sys.stderr)
"""

#: What ends how: code to run, and its return code.
ENDS = {
    "well": ("pass", 0),
    "with a code": ("raise SystemExit(7)", 7),
    "with a word": ("raise SystemExit('no')", 1),
    "with an error": ("1 / 0", 1),
    "at once": ("import os; os._exit(3)", 3),
    "killed": ("import os; os.kill(os.getpid(), 9)", -9),
    "after its last functions": ("import atexit; atexit.register(lambda: print('last'))", 0),
}


@pytest.fixture(params=["warm", pytest.param("interpreter", marks=pytest.mark.slow)])
def begin(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., warm.Started]:
    """Starts a command in `tmp_path`, one way or the other."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "SAID": "that", "HOME": str(tmp_path)}

    def start(*arguments: str, **files: int) -> warm.Started:
        return WAYS[request.param](*arguments, cwd=tmp_path, env=environment, **files)

    return start


def test_it_sees_what_it_was_given(begin: Callable[..., warm.Started], tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text(SAYS)
    expected = f"__main__ {['says.py', 'one']} {tmp_path} that 4\nTrue True True\n"
    for arguments in (["says.py"], ["-m", "says"], ["-c", SAYS]):
        code, out, err = warm.finish(begin(*arguments, "one"))
        first = {"says.py": "says.py", "-m": str(tmp_path / "says.py"), "-c": "-c"}[arguments[0]]
        assert (code, err) == (0, "error\n")
        # a locale may add a variable or two
        assert out.rpartition(" that")[0] == expected.replace("'says.py'", repr(first)).rpartition(" that")[0]
        assert out.endswith("\nTrue True True\n")


@pytest.mark.parametrize("end", ENDS)
def test_it_ends_as_interpreters_end(begin: Callable[..., warm.Started], end: str) -> None:
    text, expected = ENDS[end]
    process = begin("-c", text)
    code, out, err = warm.finish(process)
    assert (code, out) == (expected, "last\n" if "atexit" in text else "")
    assert ("ZeroDivisionError" in err) == (end == "with an error")
    assert process.poll() == code


def test_it_can_be_interrupted_and_takes_too_long(begin: Callable[..., warm.Started], tmp_path: Path) -> None:
    text = "import time\nopen('begun', 'w').close()\ntime.sleep(100)"
    process = begin("-c", text)
    while not (tmp_path / "begun").exists():
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    code, _, err = warm.finish(process)
    assert (code, "KeyboardInterrupt" in err) == (-signal.SIGINT, True)
    with pytest.raises(subprocess.TimeoutExpired):
        warm.finish(begin("-c", text), 0.2)


def test_both_streams_can_go_to_one_file(begin: Callable[..., warm.Started]) -> None:
    text = "import sys\nfor i in range(3):\n    print(i, flush=True)\n    print(-i, file=sys.stderr, flush=True)"
    _, out, err = warm.finish(begin("-c", text, stderr=subprocess.STDOUT))
    assert (out, err) == ("0\n0\n1\n-1\n2\n-2\n", "")


FORKS = """
import multiprocessing as mp, os, sys
from tcverify.system import start_process

def tell(connection):
    connection.send((os.getppid(), "torch" in sys.modules))

def same(queue):
    queue.put("torch" in sys.modules)

if __name__ == "__main__":
    queue = mp.get_context("spawn").Queue()
    one = mp.get_context("spawn").Process(target=same, args=(queue,))
    one.start(); queue.get(); one.join()
    from tests.repository.test_warm import told
    process, connection = start_process(told)
    print(one.exitcode, connection.recv())
    process.join()
"""


def told(connection: object) -> None:
    import sys

    connection.send("tcverify.verification.verifier" in sys.modules)  # type: ignore[attr-defined]


def test_it_starts_processes_of_its_own(begin: Callable[..., warm.Started], tmp_path: Path) -> None:
    (tmp_path / "forks.py").write_text(FORKS)
    assert warm.finish(begin("forks.py"), 20) == (0, "0 True\n", "")


def test_shells_can_run_it(tmp_path: Path) -> None:
    warm.executables(tmp_path, {"here": ("-c", "import os, sys; print(os.getcwd(), sys.argv[1:]); sys.exit(5)")})
    command = ["bash", "-c", f"cd /; {tmp_path}/here 'a b' c | cat; exit ${{PIPESTATUS[0]}}"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (5, "/ ['a b', 'c']\n", "")
