"""What the recipes share and what has nothing to do with distribution."""
