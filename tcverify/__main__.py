"""The command `tcverify`, and `python -m tcverify`."""

from __future__ import annotations

import gc
import sys


def main() -> None:
    """Run the command line. Ctrl-C while it is imported, which takes seconds, ends it as Ctrl-C later does."""
    gc.disable()  # what is imported stays: to look through it again and again takes a seventh of the time
    try:
        from tcverify.cli import main as command
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    gc.freeze()
    gc.enable()
    command()


if __name__ == "__main__":
    main()
