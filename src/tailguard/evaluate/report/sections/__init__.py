"""The sections of the report. A section function returns None if there is nothing to show."""
