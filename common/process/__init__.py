"""How a process starts, hangs, gets signals, and ends. Skip it at first."""
