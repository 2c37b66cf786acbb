"""Training: from images to a representation."""
