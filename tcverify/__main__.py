"""The command `tcverify`, and `python -m tcverify`."""

from __future__ import annotations

import gc
import sys


def main() -> None:
    """Run the command line. Ctrl-C during the imports has the same effect as later."""
    gc.disable()  # imported objects stay: scanning them takes a seventh of the time. Commands that import torch enable it
    try:
        from tcverify.cli.main import main as command
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    command()


if __name__ == "__main__":
    main()
