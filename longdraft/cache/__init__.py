"""Caches of keys and values: of the whole text, and a small one for drafting."""
