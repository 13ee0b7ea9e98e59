"""Prints the project's dependencies, or those of one extra: a layer of their own that sources do not invalidate."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(__file__).with_name("pyproject.toml").read_text())["project"]
wanted = project["optional-dependencies"][sys.argv[1]] if len(sys.argv) > 1 else project["dependencies"]
sys.stdout.write("\n".join(wanted) + "\n")
