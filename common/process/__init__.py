"""The life of a process: how it starts, hangs, is told to stop, and ends. Skip it at first."""
