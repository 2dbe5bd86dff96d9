"""Fuzzes the readers of files with atheris, which sees what code an input reaches.

    python -m tests.security.fuzz_loaders program --seconds 600

An input that breaks a promise of tests/security/inputs.py is written to a file, and its traceback is shown. What was found
becomes a test of what it broke.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["tcverify", "json"]):
    from tests.security.inputs import readers, seeds
    from tests.security.mutation import mutated


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Change a file as JSON, now and then as bytes."""
    rng = random.Random(seed)
    if rng.randrange(20) == 0:
        return bytes(atheris.Mutate(data, max_size))
    try:
        text = json.dumps(mutated(json.loads(data), rng)).encode()
    except (ValueError, RecursionError):
        return bytes(atheris.Mutate(data, max_size))
    return text if len(text) <= max_size else data


def main() -> None:
    """Fuzz one reader for some time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reader", choices=("program", "counterexample", "baseline"))
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument(
        "--findings", type=Path, default=Path("fuzz-findings"), help="where inputs go that break a promise"
    )
    options = parser.parse_args()
    # Not temporary: atheris ends the process at once. What it has learnt is the beginning of the next run.
    corpus = options.findings / f"corpus-{options.reader}"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds(options.reader)):
        (corpus / f"{number}.json").write_text(json.dumps(seed))
    read = readers(options.findings / "given.json")[options.reader]
    counts = {True: 0, False: 0}

    def one(data: bytes) -> None:
        counts[read(data)] += 1
        if sum(counts.values()) % 10_000 == 0:
            print(f"{counts[True]} read, {counts[False]} refused", flush=True)

    arguments: list[Any] = [
        sys.argv[0],
        f"-max_total_time={options.seconds}",
        f"-artifact_prefix={options.findings}/{options.reader}-",
        "-max_len=200000",
        "-rss_limit_mb=4096",
        "-timeout=60",
        str(corpus),
    ]
    atheris.Setup(arguments, one, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
