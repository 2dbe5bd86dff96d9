"""The command `tcverify`, and `python -m tcverify`."""

from __future__ import annotations

import gc
import sys


def main() -> None:
    """Run the command line. Ctrl-C while it is imported ends it as Ctrl-C later does."""
    gc.disable()  # what is imported stays: to look through it takes a seventh of the time. Verbs that import torch enable it then
    try:
        from tcverify.cli.main import main as command
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    command()


if __name__ == "__main__":
    main()
