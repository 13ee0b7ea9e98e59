"""A worker on another "host" whose cable is pulled: two network namespaces, real processes. Linux, root; a trial.

    python scripts/partition_trial.py [--down 8]

    namespace radixfleet-a                        namespace radixfleet-b
    scheduler, detokenizer, tokenizer  10.77.0.1 ---- veth ---- 10.77.0.2  worker

A chat streams while the link is down for a while; the text must be that of an undisturbed run. Exit code 0: it was.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
A, B = "radixfleet-a", "radixfleet-b"
ADDRESS_A, ADDRESS_B = "10.77.0.1", "10.77.0.2"
PORT = 30000
TOKENS = 80
CHAT = {
    "model": "default",
    "messages": [{"role": "user", "content": "Write a long story about a lighthouse keeper and the sea."}],
    "stream": True,
    "temperature": 0,
    "max_tokens": TOKENS,
    "ignore_eos": True,
}


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True)


@contextlib.contextmanager
def two_hosts() -> Iterator[None]:
    for name in (A, B):
        ip("netns", "add", name)
    try:
        ip("link", "add", "rfa", "netns", A, "type", "veth", "peer", "name", "rfb", "netns", B)
        for name, device, address in ((A, "rfa", ADDRESS_A), (B, "rfb", ADDRESS_B)):
            ip("-n", name, "address", "add", f"{address}/24", "dev", device)
            for up in ("lo", device):
                ip("-n", name, "link", "set", up, "up")
        yield
    finally:
        for name in (A, B):
            ip("netns", "delete", name, check=False)


@contextlib.contextmanager
def service(namespace: str, name: str, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    command = ["ip", "netns", "exec", namespace, sys.executable, "-m", "radixfleet", name, *flags]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def chat(while_streaming: Callable[[int], None] = lambda _: None) -> str:
    """The streamed text; `while_streaming(n)` is called after the n-th piece."""
    url = f"http://127.0.0.1:{PORT}/v1/chat/completions"
    curl = ["curl", "-sN", "-m", "300", "-H", "Content-Type: application/json", "-d", json.dumps(CHAT), url]
    process = subprocess.Popen(["ip", "netns", "exec", A, *curl], stdout=subprocess.PIPE, text=True)
    pieces: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("data: {"):
            choices = json.loads(line.removeprefix("data: ")).get("choices")
            if choices and choices[0]["delta"].get("content"):
                pieces.append(choices[0]["delta"]["content"])
                while_streaming(len(pieces))
    process.wait()
    return "".join(pieces)


def ready() -> bool:
    url = f"http://127.0.0.1:{PORT}/ready"
    curl = ["ip", "netns", "exec", A, "curl", "-sf", "-m", "5", url]
    return subprocess.run(curl, capture_output=True, check=False).returncode == 0


def pull_the_cable(seconds: float) -> Callable[[int], None]:
    def after(count: int) -> None:
        if count == 20:
            print(f"link down for {seconds:g} s", flush=True)
            ip("-n", A, "link", "set", "rfa", "down")
            time.sleep(seconds)
            ip("-n", A, "link", "set", "rfa", "up")
            print("link up", flush=True)

    return after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--down", type=float, default=8.0, help="seconds without a link")
    options = parser.parse_args()
    os.environ.update(RADIXFLEET_LOG_LEVEL="warning", OMP_NUM_THREADS="1")
    with contextlib.ExitStack() as stack:
        keys = stack.enter_context(tempfile.TemporaryDirectory())
        subprocess.run([sys.executable, "-m", "radixfleet", "keygen", "--dir", keys], cwd=ROOT, check=True)
        os.environ["RADIXFLEET_CURVE_DIR"] = keys
        stack.enter_context(two_hosts())
        stack.enter_context(service(A, "scheduler", "--worker-bind", f"tcp://{ADDRESS_A}:5560"))
        stack.enter_context(service(A, "detokenizer"))
        stack.enter_context(service(A, "tokenizer", "--port", str(PORT)))
        worker = ("--scheduler", f"tcp://{ADDRESS_A}:5560", "--dtype", "float32", "--max-total-tokens", "4096")
        stack.enter_context(service(B, "worker", *worker, "--threads", "1"))
        while not ready():
            time.sleep(1)
        undisturbed = chat()
        disturbed = chat(pull_the_cable(options.down))
    same = disturbed == undisturbed and len(undisturbed) > TOKENS
    print("the text is the undisturbed one" if same else f"DIFFERENT:\n{undisturbed}\n{disturbed}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
