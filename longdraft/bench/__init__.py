"""Measurements: through the public doors, data first, prose later."""
