"""What the recipes share, without collective calls but for those of sharded.py and hooks.py."""
