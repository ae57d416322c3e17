"""What the three image data sets share."""
