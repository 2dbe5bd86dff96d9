"""Compares resharding here with torch's DTensor: what each of them calls, and whether ranks hold the same in the end.

    python benchmarks/dtensor.py [--write]

Both run: DTensor on four gloo processes, the project's programs and what they are lowered to in lockstep. Prints the tables of
docs/resharding.md, or writes them there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests/ is not an installed package


@click.command()
@click.option("--write", is_flag=True, help="Write the tables into docs/resharding.md.")
def main(write: bool) -> None:
    from tests.support.dtensor_table import PAGE, run_all, table, with_table

    made = table(run_all())
    if write:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), made), encoding="utf-8")
    else:
        print(made)


if __name__ == "__main__":
    main()
