"""What is written twice for speed: compiled passes over the standard networks."""
