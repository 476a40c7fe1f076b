"""The one step: draft, verify, accept."""
