"""The model: its configuration, the table of families, the transformer and its rotary position embedding."""
