"""`radixfleet serve` with fake services: `python serve_fakes.py FLAGS`."""

import sys

from radixfleet import launch, options

if __name__ == "__main__":
    services = ("tokenizer", "scheduler", "detokenizer", "worker")
    sys.exit(launch.serve(options.parse(sys.argv[1:]), dict.fromkeys(services, "fake_service")))
