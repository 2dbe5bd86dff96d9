"""Imports of the fork server: everything that its children need, so that they start in 30 ms.

When it ends, after its owner, it removes the files that a killed owner left.

In other processes, importing this does nothing.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os

from tcverify.system import LAZY_MODULES
from tcverify.system.scratch import VARIABLE, remove_left, remove_unused

#: Time limit for an owner to end, in seconds. Children that it forked may keep the directory.
PATIENCE_SECONDS = 10.0

_directory = os.environ.pop(VARIABLE, None)
if _directory is not None:
    atexit.register(remove_left, os.path.dirname(_directory))  # then those of workers, which ended with the owner
    atexit.register(remove_unused, _directory, PATIENCE_SECONDS)  # its children end without what is registered here
    gc.disable()  # what is imported stays: to look through it again and again takes time
    for _module in ("tcverify.verification.verifier", *LAZY_MODULES):
        importlib.import_module(_module)
    gc.freeze()  # nor do the processes look at it, who would write into the pages that they share
    atexit.register(gc.unfreeze)  # what is never looked at libraries call leaked, on the terminal
    gc.enable()
