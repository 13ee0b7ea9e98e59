"""`python -m radixfleet`: the same as the command `radixfleet`."""

import sys

from radixfleet.cli import main

if __name__ == "__main__":
    sys.exit(main())
