"""Clients that users have, each in an environment of its own, against a server of ours.

    python scripts/clients.py [--only openai] [--write docs/clients.md]

Ends with the number of clients that failed. Environments stay in build/clients, so a second run is quick.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from radixfleet.local_server import LocalServer  # noqa: E402

ENVIRONMENTS = ROOT / "build" / "clients"
PROGRAMS = ROOT / "scripts" / "client_programs"


@dataclass(frozen=True)
class Client:
    """What to install, and the program that ends with 0 when everything it asked came back right."""

    package: str
    program: str
    requirements: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.package.partition("[")[0]


CLIENTS = {
    client.name.replace("_", "-"): client
    for client in (
        Client("openai", "openai_client.py"),
        Client("litellm", "litellm_client.py"),
        Client("langchain-openai", "langchain_client.py"),
        Client("instructor", "instructor_client.py"),
        Client("anthropic", "anthropic_client.py"),
        Client("lm_eval[api]", "lm_eval_client.py", ("datasets", "transformers")),
    )
}


def environment(name: str, client: Client) -> Path:
    """The Python of an environment with that client, made once."""
    folder = ENVIRONMENTS / name
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        print(f"{name}: installing", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, client.package, *client.requirements], check=True)
        (folder / "complete").touch()
    return python


def version(python: Path, package: str) -> str:
    code = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(CLIENTS))
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    rows, failed = [], 0
    chosen = {options.only: CLIENTS[options.only]} if options.only else CLIENTS
    pythons = {name: environment(name, client) for name, client in chosen.items()}
    with LocalServer("--log-level", "warning") as server:
        for name, client in chosen.items():
            command = [str(pythons[name]), str(PROGRAMS / client.program), server.url]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
            verdict = "passes" if done.returncode == 0 else "fails"
            failed += done.returncode != 0
            rows.append(f"| {name} {version(pythons[name], client.name)} | {verdict} |")
            print(rows[-1], done.stderr[-2000:] if done.returncode else "", flush=True)
    if options.write:
        head = (
            f"# Last run of the clients\n\n`make clients` on {time.strftime('%Y-%m-%d')}\n\n| client | |\n|---|---|\n"
        )
        options.write.write_text(head + "\n".join(rows) + "\n")
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
