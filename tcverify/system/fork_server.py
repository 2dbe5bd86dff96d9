"""What the fork server imports: all that the processes which it forks need, so that they start in 30 ms.

When it ends, which is after its owner has, it removes what a killed owner has left.

Elsewhere importing this does nothing.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os

from tcverify.system import LAZY_MODULES
from tcverify.system.scratch import VARIABLE, remove_unused

#: Seconds that an owner may take to end. One that has forked may leave a copy of itself, which keeps the directory.
PATIENCE_SECONDS = 10.0

_directory = os.environ.pop(VARIABLE, None)
if _directory is not None:
    atexit.register(remove_unused, _directory, PATIENCE_SECONDS)  # its children end without what is registered here
    gc.disable()  # what is imported stays: to look through it again and again takes time
    for _module in ("tcverify.verification.verifier", *LAZY_MODULES):
        importlib.import_module(_module)
    gc.freeze()  # nor do the processes look at it, who would write into the pages that they share
    atexit.register(gc.unfreeze)  # what is never looked at libraries call leaked, on the terminal
    gc.enable()
