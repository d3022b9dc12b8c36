"""The application: what brings engine, market and verdict together. Knows everybody; only the command line knows it."""
