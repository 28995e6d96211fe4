"""``python -m frl``."""

import sys

from frl.cli import main

if __name__ == "__main__":
    sys.exit(main())
