"""Batched environments, the return observer, and test problems with known optima."""
