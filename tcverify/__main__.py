"""The command `tcverify`, and `python -m tcverify`."""

from __future__ import annotations

import gc
import sys


def main() -> None:
    """Run the command line. Ctrl-C during the imports has the same effect as later."""
    gc.disable()  # imported objects stay: scanning them takes a seventh of the time. Commands that import torch enable it
    try:
        try:
            from tcverify.cli.main import main as command
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise SystemExit(130) from None
        command()
    finally:
        # A KeyboardInterrupt that leaves an exec of text, as dataclasses use it, makes Python end with SIGINT instead of our exit
        # code, although it has been handled. The next exec of text resets that.
        exec("")  # noqa: S102


if __name__ == "__main__":
    main()
