"""Engines, which train the members and carry out the decisions of the scheduler: serial, processes, Ray."""
