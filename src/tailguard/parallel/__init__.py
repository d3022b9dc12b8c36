"""Work on more than one core: threads that change no bit, worker processes, and independent tasks here or on a Ray cluster."""
