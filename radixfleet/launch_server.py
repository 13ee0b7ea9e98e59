"""`python -m radixfleet.launch_server FLAGS`: the same as `radixfleet serve FLAGS`."""

import sys

from radixfleet.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
