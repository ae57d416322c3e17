"""Python imports this first in every process that a test starts (conftest.py).

Few garbage collections: the hundreds that the imports of torch set off take a second on a slow
core, and the tests start a thousand processes.
"""

import gc

gc.set_threshold(100_000, 50, 100)
