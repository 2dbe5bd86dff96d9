"""What the fork server imports first: when it ends, which is after its owner has, it removes what a killed owner has left.

Elsewhere importing this does nothing.
"""

from __future__ import annotations

import atexit
import os

from tcverify.execution.scratch import VARIABLE, remove_unused

#: Seconds that an owner may take to end. One that has forked may leave a copy of itself, which keeps the directory.
PATIENCE_SECONDS = 10.0

_directory = os.environ.pop(VARIABLE, None)
if _directory is not None:
    atexit.register(remove_unused, _directory, PATIENCE_SECONDS)  # its children end without what is registered here
