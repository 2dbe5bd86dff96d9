"""The cost model against the clocks of a CUDA device: `python benchmarks/gpu_clocks.py --seconds 100 --out DIR`.

Prints Markdown: the device's profile from measurement, as TOML; measured times of single ops against predicted ones; measured
makespans of multistream schedules against predicted ones. Everything is captured into CUDA graphs and timed by events, so that
the host does not count. `--rehearse` does the same with tiny programs on the CPU, without graphs and streams.
"""

from __future__ import annotations

import json
import sys
import time

START = time.monotonic()

import traceback  # noqa: E402 - the time that imports take counts
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import click  # noqa: E402
import torch  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1]))

from clock_device import Clock, CpuClock, CudaClock  # noqa: E402
from clock_ops import OpTimes, measure_ops, ops_section  # noqa: E402
from clock_profile import NETWORK, VENDOR, Measured, measure, profile_section  # noqa: E402
from clock_schedules import ScheduleTimes, measure_schedules, schedules_section  # noqa: E402

from tcverify.cost import PROFILES, DeviceProfile  # noqa: E402

#: When each part ends, as shares of the whole time.
ENDS = {"profile": 0.2, "ops": 0.55, "schedules": 0.96}


@click.command()
@click.option("--seconds", type=click.FloatRange(5), default=100, show_default=True, help="Bound of the whole run.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Where the profile and all times go.")
@click.option("--rehearse", is_flag=True, help="Tiny programs on the CPU, without graphs and streams.")
@click.option("--schedules", type=click.IntRange(1), default=200, show_default=True, help="How many are measured.")
def main(seconds: float, out: Path | None, rehearse: bool, schedules: int) -> None:
    if not rehearse and not torch.cuda.is_available():
        click.echo("there is no CUDA device; --rehearse runs on the CPU", err=True)
        sys.exit(2)
    torch.set_num_threads(1)
    clock: Clock = CpuClock() if rehearse else CudaClock()
    row = next((row for row in VENDOR if row[0] in clock.name), None)
    known = PROFILES[NETWORK if row is None else row[1] if row[1] in PROFILES else row[2]]
    ends = {part: START + share * seconds for part, share in ENDS.items()}
    failed: list[str] = []

    def part(name: str, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except Exception:  # noqa: BLE001 - the other parts still have their say
            traceback.print_exc()
            failed.append(name)
            print(f"\nThis part failed: {traceback.format_exc().strip().splitlines()[-1][:300]}\n", flush=True)
            return None
        finally:
            click.echo(f"{name}: done after {time.monotonic() - START:.1f} s", err=True)

    print(f"## Cost model against clocks{' (rehearsal on the CPU: times mean nothing)' if rehearse else ''}\n")
    print(f"On one {clock.name}, torch {torch.__version__}; the known profile is {known.name}.\n")
    print("### A profile from measurement", flush=True)
    measured = Measured()
    profile: DeviceProfile = known

    def profile_part() -> None:
        nonlocal measured, profile
        measured = measure(clock, rehearse, ends["profile"])
        text, profile, toml = profile_section(clock, measured)
        print(text, flush=True)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / f"{profile.name}.toml").write_text(toml, encoding="utf-8")

    part("profile", profile_part)
    print("### Ops\n", flush=True)
    profiles = {known.name: known, "measured profile": profile}

    def ops_part() -> OpTimes:
        found = measure_ops(clock, profiles, rehearse, 60 if rehearse else 1500, ends["ops"])
        print(ops_section(found, list(profiles)), flush=True)
        return found

    ops: OpTimes | None = part("ops", ops_part)
    print("### Schedules\n", flush=True)

    def schedules_part() -> ScheduleTimes:
        most = min(schedules, 8) if rehearse else schedules
        found = measure_schedules(clock, profile, measured.hop, rehearse, most, ends["schedules"])
        print(schedules_section(found), flush=True)
        return found

    made: ScheduleTimes | None = part("schedules", schedules_part)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "clocks.json").write_text(json.dumps(rows(ops, made), indent=1), encoding="utf-8")
    wrong = (ops.wrong if ops else []) + (made.wrong if made else [])
    sys.exit(1 if failed or wrong else 0)


def rows(ops: OpTimes | None, schedules: ScheduleTimes | None) -> dict[str, Any]:
    """All times, as JSON."""
    timed = [] if ops is None else ops.timed
    made = [] if schedules is None else schedules.timed
    return {
        "ops": [{"op": op.what, "kind": op.kind, "measured": op.measured, "predicted": op.predicted} for op in timed],
        "schedules": [
            {
                "stand_in": t.stand_in, "times": t.times, "ops": t.ops, "predicted": t.predicted, "serial": t.predicted_serial,
                "several": t.several, "one": t.one,
            }
            for t in made
        ],
    }  # fmt: skip


if __name__ == "__main__":
    main()
