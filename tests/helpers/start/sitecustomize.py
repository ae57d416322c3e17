"""Python imports this first in every process that a test starts (conftest.py).

Fewer garbage collections save each process that loads torch a second or two.
"""

import atexit
import gc

# The hundreds of collections that the imports of torch set off take a second on a slow core.
gc.set_threshold(100_000, 50, 100)
# So do the two at Python's end, and the operating system frees the same a moment later.
atexit.register(gc.freeze)
