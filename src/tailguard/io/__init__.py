"""Files and state as data: atomic writes, the checkpoint format, random numbers and environments."""
