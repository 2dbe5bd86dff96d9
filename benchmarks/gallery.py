"""Makes the gallery of counterexamples, and counts how often its reports name the node that a defect got wrong.

    python benchmarks/gallery.py [--write] [SLUG]...

Without --write, the cases in reports/gallery are judged unchanged. With it they are generated again: programs are drawn, verified
in lockstep and reduced, the same ones on every machine. One row per exhibit: what the report names first, what is planted, and
whether they agree. Exhibits without a rewritten graph, or whose defect leaves no node behind, are not counted.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import click
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests/ is not an installed package

from tcverify.cases.counterexample import read_counterexample


@click.command()
@click.argument("slugs", nargs=-1)
@click.option("--write", is_flag=True, help="Generate the cases again and write them.")
@click.option("--seconds", type=float, default=60.0, show_default=True, help="Most time to reduce one case.")
def main(slugs: tuple[str, ...], write: bool, seconds: float) -> None:
    from tests.mutants.exhibit_list import EXHIBITS
    from tests.mutants.exhibits import GALLERY, first_bad_node, make_case, write_case

    torch.set_num_threads(1)
    named = counted = 0
    for exhibit in EXHIBITS:
        if slugs and exhibit.slug not in slugs:
            continue
        start = time.monotonic()
        if write:
            made = make_case(exhibit, seconds)
            if made is None:
                print(f"{exhibit.slug:<34} NOT FOUND ({time.monotonic() - start:.0f} s)", flush=True)
                continue
            write_case(exhibit, made)
        case = read_counterexample(GALLERY / exhibit.slug / "counterexample.json")
        about = json.loads((GALLERY / exhibit.slug / "about.json").read_text())
        first, known = first_bad_node(case), about["planted"]
        verdict = "-" if not known else "yes" if first in known else "no"
        counted += bool(known)
        named += verdict == "yes"
        cut = " cut" if case.shrink_cut else ""
        took = f" {time.monotonic() - start:.0f} s" if write else ""
        print(
            f"{exhibit.slug:<34} {case.finding.kind:<22} {case.program.size:>2} nodes{cut}{took:<5} {verdict:<4}"
            f" {first or '-'} | {', '.join(known) or '-'}",
            flush=True,
        )
    print(f"the report names a planted node first in {named} of {counted} exhibits that have one")


if __name__ == "__main__":
    main()
