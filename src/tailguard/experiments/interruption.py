"""The end of work that somebody asked to stop."""


class Interrupted(Exception):
    """Something was asked to stop, and did, in good order; the text says how to go on."""
