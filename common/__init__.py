"""Small tools that the recipes share. They take values, raise exceptions, and know no flags and no images."""
