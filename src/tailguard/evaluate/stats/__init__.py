"""Statistics of returns: performance, intervals, tests."""
