"""The laboratory: from images to a representation to an accuracy."""
