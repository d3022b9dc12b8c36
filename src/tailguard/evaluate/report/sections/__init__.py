"""The sections of the report, one idea each. A section that has nothing to show is None."""
