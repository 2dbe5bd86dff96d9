"""All that needs a CUDA device: `make gpu`, or python benchmarks/gpu.py [--minutes M] [--out DIR] [SECTION]...

Runs the tests that need a device, then measurements, each a script of its own with a share of the time. Leaves gpu.md in DIR,
which is also printed, and JUnit results of the tests. Ends with 1 if a test fails or a section disagrees with what tcverify
says, and with 2 if there is no device.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from datetime import date
from pathlib import Path

import click
import torch

ROOT = Path(__file__).resolve().parent.parent
#: Tests that need a device, or take one for their ranks.
TESTS = (
    "tests/execution/streams/test_on_cuda.py",
    "tests/execution/test_pool.py",
    "tests/ops/test_nccl.py",
    "tests/cli/test_cuda.py",
)
#: Share of the time of each section. What one leaves goes to those after it.
SECTIONS = {"tests": 0.23, "streams": 0.11, "native": 0.29, "clocks": 0.17, "compile": 0.20}
#: Most lines of what a section prints beside its tables, where it fails.
MOST_LINES = 15


def environment() -> dict[str, str]:
    return {
        **os.environ, "PYTHONPATH": str(ROOT), "TCVERIFY_TESTS_DEVICE": "cuda", "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "PYTHONUNBUFFERED": "1",
        "TCVERIFY_TESTS_COLD": "1",  # a process that has asked for devices cannot be forked
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # a machine with a device may have any
    }  # fmt: skip


def run(command: list[str], seconds: float) -> tuple[int, str, str]:
    """Exit code, and what was printed; 124 for what ran out of time."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    # Interrupted, pytest tells what it knows.
    for number, limit in ((signal.SIGINT, seconds), (signal.SIGKILL, 10), (None, 10)):
        try:
            out, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            if number is not None:
                os.killpg(process.pid, number)
        else:
            stopped = f"\nstopped after {seconds:.0f} s" if number is not signal.SIGINT else ""
            return 124 if stopped else process.returncode, out, errors + stopped
    return 124, "", f"does not end after {seconds:.0f} s"


def tests(seconds: float, out: Path) -> tuple[int, str]:
    """The tests, and a table of them with the reasons of those skipped."""
    junit = out / "gpu.xml"
    # Two at a time: ranks are processes that share the device, and a virtual machine's may take little more than a dozen.
    options = ["-v", "-p", "xdist", "-p", "pytest_timeout", "-n", "2", "--dist", "loadfile", "--tb", "short"]
    command = [sys.executable, "-m", "pytest", *options, f"--junitxml={junit}", *TESTS]
    code, printed, errors = run(command, seconds)
    lines = ["## Tests on the device", ""]
    if junit.exists():
        suite = next(ElementTree.parse(junit).getroot().iter("testsuite"))
        numbers = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
        passed = numbers["tests"] - numbers["failures"] - numbers["errors"] - numbers["skipped"]
        lines += ["| passed | failed | skipped |", "|--:|--:|--:|"]
        lines += [f"| {passed} | {numbers['failures'] + numbers['errors']} | {numbers['skipped']} |", ""]
        for case in suite.iter("testcase"):
            lines += [f"- skipped: {case.get('name')}: {skip.get('message')}" for skip in case.iter("skipped")]
            for failure in (*case.iter("failure"), *case.iter("error")):
                lines.append(f"- failed: {case.get('name')}: {(failure.get('message') or '').splitlines()[:1]}")
    if code:
        (out / "tests.txt").write_text(printed + errors)
        lines += ["", f"pytest ended with {code}; what it printed is in tests.txt."]
    return code, "\n".join(lines)


def section(name: str, seconds: float, out: Path) -> tuple[int, str]:
    script = ROOT / "benchmarks" / f"gpu_{name}.py"
    command = [sys.executable, str(script), "--seconds", f"{seconds:.0f}", "--out", str(out)]
    code, printed, errors = run(command, seconds + 20)
    (out / f"{name}.txt").write_text(errors)
    if code in (0, 1) and printed:
        return code, printed
    return code, f"{printed}\n## {name}: ended with {code}\n\n" + "\n".join(errors.splitlines()[-MOST_LINES:])


def device() -> str:
    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    number = f"{torch.cuda.device_count()} × " if torch.cuda.device_count() > 1 else ""
    return (
        f"{number}{properties.name}, {properties.total_memory / 2**30:.0f} GiB, torch {torch.__version__}, "
        f"CUDA {torch.version.cuda}, Python {platform.python_version()}, {date.today()}"
    )


@click.command()
@click.argument("names", nargs=-1, metavar="[SECTION]...")
@click.option("--minutes", type=click.FloatRange(0.1), default=7.8, show_default=True, help="Time limit for all.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("gpu-results"), show_default=True, help="Where results go."
)
def main(names: tuple[str, ...], minutes: float, out: Path) -> None:
    for name in names:
        if name not in SECTIONS:
            raise click.UsageError(f"there is no section '{name}'; sections are {', '.join(SECTIONS)}")
    if not torch.cuda.is_available():
        print(f"There is no CUDA device. Skipped: {', '.join(names or SECTIONS)}.", file=sys.stderr)
        sys.exit(2)
    out.mkdir(parents=True, exist_ok=True)
    out = out.resolve()
    left = {name: share for name, share in SECTIONS.items() if not names or name in names}
    stop = time.monotonic() + 60 * minutes
    pages = [f"# tcverify on a device\n\n{device()}."]
    failed = []
    while left:
        begun = time.monotonic()
        name = next(iter(left))
        seconds = (stop - begun) * left[name] / sum(left.values())
        del left[name]
        code, page = tests(seconds, out) if name == "tests" else section(name, seconds, out)
        failed += [name] if code else []
        pages.append(f"{page.strip()}\n\n{time.monotonic() - begun:.0f} s.")
        print(pages[-1], flush=True)
        (out / "gpu.md").write_text("\n\n".join(pages) + "\n")
    print(f"\nwritten: {out / 'gpu.md'}" + (f"; not as it must be: {', '.join(failed)}" if failed else ""))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
