"""From files on disk to the views that a network sees."""
