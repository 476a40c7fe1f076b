"""Batch jobs: write many texts from a file of prompts, on one machine or several, and resume after any interruption."""
