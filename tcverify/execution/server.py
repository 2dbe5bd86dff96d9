"""What the fork server imports first: when it ends, which is after its owner has, it removes what a killed owner has left.

Elsewhere importing this does nothing.
"""

from __future__ import annotations

import atexit
import os

from tcverify.execution.scratch import VARIABLE, remove_unused

_directory = os.environ.pop(VARIABLE, None)
if _directory is not None:
    atexit.register(remove_unused, _directory)  # its children end without what is registered here
