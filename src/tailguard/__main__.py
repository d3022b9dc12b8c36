"""``python -m tailguard`` is the command ``tailguard``."""

from tailguard.cli import main

if __name__ == "__main__":
    main()
