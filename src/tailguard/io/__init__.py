"""Files and state as data: atomic writes, the checkpoint format, the state of random numbers and environments."""
