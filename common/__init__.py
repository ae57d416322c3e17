"""Small tools that the recipes share. They know no images; only run.py reads a recipe's flags."""
