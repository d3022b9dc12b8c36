"""Batched environments, the return observer, and problems with known optima."""
