"""``python -m gpumem_nb.course FILES…``: one table of what students handed in."""

import sys

from .handed_in import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
