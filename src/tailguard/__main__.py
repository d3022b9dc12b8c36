"""Run the command ``tailguard`` as ``python -m tailguard``."""

from tailguard.cli import main

if __name__ == "__main__":
    main()
