"""Engines carry out what the scheduler decides."""
