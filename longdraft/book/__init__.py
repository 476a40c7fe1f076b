"""Books: an outline and its chapters from a premise (book.py), and exports as Markdown and EPUB 3 (export.py)."""
