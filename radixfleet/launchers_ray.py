"""Places workers on a Ray cluster: N tasks that each run one `radixfleet worker` until they are cancelled.

    python -m radixfleet.launchers_ray --workers 8 --scheduler tcp://0.0.0.0:5560

A process of its own under `radixfleet serve --launcher ray`. Ray chooses the nodes (by GPU or CPU cores) and starts a
task again elsewhere when its node is lost; here a worker that ended by itself is placed again. Leaves joining to the
workers: nobody keeps a list of them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from radixfleet.orphan import die_with_parent

PREFIX = "RADIXFLEET_"
LOCAL = frozenset(  # what only makes sense on the machine of the launcher
    PREFIX + name for name in ("SERVICE_ID", "RUN_DIR", "PARENT_FD", "READY_FD", "ALIVE_FD", "MODEL_PATH", "HTTP_FD")
)
STOP_S = 60.0  # for a worker to drain
RECENT_S = 60.0
MAX_DEATHS = 5  # of each worker's place within that time
ALIVE_INTERVAL_S = 1.0


def run_worker(arguments: Sequence[str], variables: Mapping[str, str]) -> int:
    """In a task on some node: one worker, ended by SIGTERM when the task is cancelled. Returns its exit code.

    The end of the pipe tells the worker that the task's process was killed.
    """
    command = [sys.executable, "-m", "radixfleet", "worker", *arguments]
    watched, held = os.pipe()
    env = {**os.environ, **variables, PREFIX + "PARENT_FD": str(watched)}
    process = subprocess.Popen(command, env=env, process_group=0, pass_fds=(watched,))
    os.close(watched)
    try:
        return process.wait()
    except BaseException:  # Ray cancels by raising KeyboardInterrupt here
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        raise
    finally:
        if process.poll() is None:
            process.kill()
        os.close(held)


class Placement:
    """The tasks of one fleet. `ray` is the module, so that tests can play it."""

    def __init__(self, ray: Any, arguments: Sequence[str], variables: Mapping[str, str], resources: Any) -> None:
        self._ray = ray
        self._arguments = list(arguments)
        self._variables = dict(variables)
        self._task = ray.remote(**resources, max_retries=-1)(run_worker)
        self._running: dict[Any, int] = {}
        self._deaths: deque[float] = deque()

    def place(self, number: int) -> None:
        self._running[self._task.remote(self._arguments, self._variables)] = number

    def look(self, seconds: float) -> None:
        """Wait so long for workers that end, and place them again. Raises SystemExit when too many do."""
        ended, _ = self._ray.wait(list(self._running), num_returns=1, timeout=seconds)
        for reference in ended:
            number = self._running.pop(reference)
            say(f"worker {number} {self._outcome(reference)}, placing it again")
            self._count_death()
            self.place(number)

    def cancel(self) -> None:
        """End every worker and wait until all have ended."""
        for reference in self._running:
            self._ray.cancel(reference)
        if self._running:
            self._ray.wait(list(self._running), num_returns=len(self._running), timeout=STOP_S + ALIVE_INTERVAL_S)

    def _outcome(self, reference: Any) -> str:
        try:
            return f"ended with exit code {self._ray.get(reference)}"
        except Exception as error:  # whatever kept the task from running: it is said, and tried again
            return f"failed: {error}"

    def _count_death(self) -> None:
        now = time.monotonic()
        self._deaths.append(now)
        while now - self._deaths[0] > RECENT_S:
            self._deaths.popleft()
        if len(self._deaths) > MAX_DEATHS * (len(self._running) + 1):
            raise SystemExit("radixfleet: workers on the Ray cluster end again and again")


def say(line: str) -> None:
    sys.stderr.write(f"radixfleet: {line}\n")
    sys.stderr.flush()


def variables_for_nodes(environ: Mapping[str, str]) -> dict[str, str]:
    """Settings that a worker on another machine needs as well."""
    return {name: value for name, value in environ.items() if name.startswith(PREFIX) and name not in LOCAL}


def reachable(endpoint: str, address: str) -> str:
    """A bound endpoint as other machines reach it."""
    for everywhere in ("://*:", "://0.0.0.0:", "://[::]:"):
        endpoint = endpoint.replace(everywhere, f"://{address}:")
    return endpoint


def main(argv: Sequence[str] | None = None, ray: Any = None) -> int:
    parser = argparse.ArgumentParser(prog="radixfleet.launchers_ray", description="Place workers on a Ray cluster.")
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--scheduler", required=True, help="the scheduler's endpoint for workers")
    parser.add_argument("--model", default="", help="as for serve; each node makes it available itself")
    parser.add_argument("--address", default="auto", help="of the cluster; local: one on this machine alone [auto]")
    parser.add_argument("--gpus", type=float, default=0.0, help="GPUs of a worker [0]")
    parser.add_argument("--cpus", type=float, default=1.0, help="CPU cores of a worker [1]")
    options = parser.parse_args(argv)
    die_with_parent()
    ray = ray or _import_ray()
    try:
        ray.init(address=options.address, ignore_reinit_error=True, log_to_driver=True)
    except ConnectionError as error:
        raise SystemExit(f"radixfleet: no Ray cluster: {error}; `ray start --head` starts one") from error
    scheduler = reachable(options.scheduler, ray.util.get_node_ip_address())
    arguments = ["--scheduler", scheduler, *(["--model-path", options.model] if options.model else [])]
    resources = {"num_cpus": options.cpus, "num_gpus": options.gpus}
    placement = Placement(ray, arguments, variables_for_nodes(os.environ), resources)
    _live(placement, options.workers)
    ray.shutdown()
    return 0


class _Stop(Exception):
    pass


def _live(placement: Placement, workers: int) -> None:
    """Until SIGTERM or SIGINT, or the end of whoever started us."""

    def stop(number: int, frame: object) -> None:
        raise _Stop

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    alive = os.environ.get(PREFIX + "ALIVE_FD")
    try:
        for place in range(workers):
            placement.place(place)
        say(f"{workers} workers handed to Ray")
        while True:
            placement.look(ALIVE_INTERVAL_S)
            if alive is not None:
                os.write(int(alive), b"a")
    except _Stop:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    finally:
        placement.cancel()


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise SystemExit("radixfleet: --launcher ray needs Ray: pip install 'radixfleet[ray]'") from error
    return ray


if __name__ == "__main__":
    sys.exit(main())
