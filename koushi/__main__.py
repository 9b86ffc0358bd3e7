"""``python -m koushi`` and ``torchrun -m koushi``."""

from koushi.cli import main

if __name__ == "__main__":
    main()
