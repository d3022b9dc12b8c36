"""Experiments: training runs, evaluation, walk-forward, populations, export and live trading."""


class Interrupted(Exception):
    """Work was asked to stop and did so in good order; the message says how to continue."""
