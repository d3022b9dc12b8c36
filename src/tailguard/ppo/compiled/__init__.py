"""Compiled passes over the standard networks: everything here is written twice, for speed, and tested against torch."""
