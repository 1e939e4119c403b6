"""The last module that the forkserver imports (tests/forking.py).

What it has imported by now is no garbage of its children: each would look through all of it, a
million objects with torch's, as it becomes ready, and so copy the pages that they share.
"""

import gc

from litestar import Litestar

Litestar()  # imports the framework's plugins, half of what an engine's start takes
gc.collect()
gc.freeze()
