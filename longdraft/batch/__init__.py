"""Batch jobs: many texts from a file of prompts, on one machine or on many, restarted where they were cut."""
