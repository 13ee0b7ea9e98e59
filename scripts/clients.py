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


@dataclass(frozen=True)
class Client:
    """A package and a program that ends with 0 when everything it asked came back right; argv[1] is the URL."""

    package: str
    program: str


OPENAI = """
import asyncio, sys, openai
url = sys.argv[1] + "/v1"
ask = [{"role": "user", "content": "What is the capital of France?"}]
client = openai.OpenAI(base_url=url, api_key="none")
whole = client.chat.completions.create(model="default", messages=ask, temperature=0, max_tokens=24)
assert "Paris" in whole.choices[0].message.content
text = ""
for chunk in client.chat.completions.create(model="default", messages=ask, temperature=0, max_tokens=24, stream=True):
    text += chunk.choices[0].delta.content or ""
assert text == whole.choices[0].message.content
async def main():
    async with openai.AsyncOpenAI(base_url=url, api_key="none") as many:
        answers = await asyncio.gather(*(many.completions.create(model="default", prompt="A list: 1,", max_tokens=8,
            temperature=0) for _ in range(8)))
        assert len({a.choices[0].text for a in answers}) == 1
        [m] = [m async for m in many.models.list()]
        assert m.id
asyncio.run(main())
"""

LITELLM = """
import sys, litellm
ask = [{"role": "user", "content": "What is the capital of France?"}]
common = dict(model="openai/default", api_base=sys.argv[1] + "/v1", api_key="none", messages=ask)
common.update(temperature=0, max_tokens=24)
whole = litellm.completion(**common)
assert "Paris" in whole.choices[0].message.content
text = "".join(c.choices[0].delta.content or "" for c in litellm.completion(**common, stream=True))
assert text == whole.choices[0].message.content
"""

LANGCHAIN = """
import sys
from langchain_openai import ChatOpenAI
chat = ChatOpenAI(model="default", base_url=sys.argv[1] + "/v1", api_key="none", temperature=0, max_tokens=24)
whole = chat.invoke("What is the capital of France?").content
assert "Paris" in whole
assert "".join(part.content for part in chat.stream("What is the capital of France?")) == whole
"""

CLIENTS = {
    "openai": Client("openai", OPENAI),
    "litellm": Client("litellm", LITELLM),
    "langchain-openai": Client("langchain-openai", LANGCHAIN),
}


def environment(name: str, package: str) -> Path:
    """The Python of an environment with that package, made once."""
    folder = ENVIRONMENTS / name
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        print(f"{name}: installing", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package]
        subprocess.run(pip, check=True)
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
    pythons = {name: environment(name, client.package) for name, client in chosen.items()}
    with LocalServer("--log-level", "warning") as server:
        for name, client in chosen.items():
            command = [str(pythons[name]), "-c", client.program, server.url]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            verdict = "passes" if done.returncode == 0 else "fails"
            failed += done.returncode != 0
            rows.append(f"| {name} {version(pythons[name], client.package)} | {verdict} |")
            print(rows[-1], done.stderr[-2000:] if done.returncode else "", flush=True)
    if options.write:
        head = (
            f"# Last run of the clients\n\n`make clients` on {time.strftime('%Y-%m-%d')}\n\n| client | |\n|---|---|\n"
        )
        options.write.write_text(head + "\n".join(rows) + "\n")
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
