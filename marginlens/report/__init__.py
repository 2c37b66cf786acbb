"""Pages, tables and pictures of what was measured."""
