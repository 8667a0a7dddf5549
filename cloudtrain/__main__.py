"""Run the command line: ``python -m cloudtrain``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
