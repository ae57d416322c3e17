"""What all recipes share; nothing in it is about distribution."""
