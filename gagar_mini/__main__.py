"""`python -m gagar_mini`, which is also what torchrun starts."""

import sys

from gagar_mini.cli import main

if __name__ == "__main__":
    sys.exit(main())
