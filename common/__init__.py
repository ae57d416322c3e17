"""Small tools that the recipes share. They take values, and know no flags and no images."""
