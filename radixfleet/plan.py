"""What `serve` starts: one ChildSpec per process, with its sockets and settings. Starts nothing itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from radixfleet.app import MODULES, command, environment
from radixfleet.flags import PREFIX
from radixfleet.models import SMALL_MODEL_NAME
from radixfleet.options import ServeOptions
from radixfleet.supervise import ChildSpec


def child_specs(
    options: ServeOptions,
    model: Path,
    folder: Path,
    http_fd: int,
    modules: Mapping[str, str] = MODULES,
    address: tuple[str, int] | None = None,
) -> list[ChildSpec]:
    """scheduler, detokenizer, workers, tokenizer; `http_fd` is the tokenizer's listening socket, on `address`.

              tokenizer.sock        detokenizer.sock       text.sock
    tokenizer ------------> scheduler <------------ detokenizer <------------ tokenizer
                                ^ worker.sock (or --worker-bind)
                              workers
    """
    listening = {} if address is None else {PREFIX + "HOST": address[0], PREFIX + "PORT": str(address[1])}
    base = environment({**os.environ, **options.variables})
    base.update(_settings(options, model, folder))
    worker_bind = options.worker_bind or _ipc(folder, "worker")

    def spec(name: str, service: str, extra: Mapping[str, str] | None = None, **settings: str) -> ChildSpec:
        own = {PREFIX + key.upper(): value for key, value in settings.items()}
        env = {**base, PREFIX + "SERVICE_ID": name, **own, **(extra or {})}
        fds = (http_fd,) if service == "tokenizer" else ()
        return ChildSpec(name, command(modules[service]), env, fds, announces=service in ("tokenizer", "worker"))

    return [
        spec(
            "scheduler",
            "scheduler",
            tokenizer_bind=_ipc(folder, "tokenizer"),
            detokenizer_bind=_ipc(folder, "detokenizer"),
            worker_bind=worker_bind,
        ),
        spec(
            "detokenizer", "detokenizer", scheduler=_ipc(folder, "detokenizer"), bind=_ipc(folder, "text"), advertise=""
        ),
        *(
            spec(f"worker-{n}", "worker", _share(options, n), scheduler=_local(worker_bind))
            for n in range(options.workers)
        ),
        spec("tokenizer", "tokenizer", listening, scheduler=_ipc(folder, "tokenizer"), http_fd=str(http_fd)),
    ]


def _settings(options: ServeOptions, model: Path, folder: Path) -> dict[str, str]:
    name = options.model_path or SMALL_MODEL_NAME
    settings = {
        "MODEL_PATH": str(model),
        "MODEL_NAME": options.variable("model_name") or name,
        "RUN_DIR": str(folder),
    }
    return {PREFIX + key: value for key, value in settings.items()}


def _ipc(folder: Path, name: str) -> str:
    return f"ipc://{folder}/{name}.sock"


def _local(endpoint: str) -> str:
    """A bound endpoint as a process on the same machine connects to it."""
    for everywhere in ("://*:", "://0.0.0.0:", "://[::]:"):
        endpoint = endpoint.replace(everywhere, "://127.0.0.1:")
    return endpoint


def _share(options: ServeOptions, number: int) -> dict[str, str]:
    """Variables for one worker's part of the machine where there are several: its GPU, or its share of the cores."""
    if options.workers == 1:
        return {}
    gpus = visible_gpus(os.environ) if options.variable("device", "auto") != "cpu" else []
    if gpus:
        return {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]}
    if options.variable("threads"):
        return {}
    return {PREFIX + "THREADS": str(max(1, len(os.sched_getaffinity(0)) // options.workers))}


def visible_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """Names for CUDA_VISIBLE_DEVICES, one per GPU this process may use."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name.strip()]
    return [str(n) for n, _ in enumerate(sorted(devices.glob("nvidia[0-9]*")))]
