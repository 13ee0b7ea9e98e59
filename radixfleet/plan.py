"""What `serve` starts: one ChildSpec per process, with its sockets and settings. Starts nothing itself."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from radixfleet.app import MODULES, command, environment, on_path, package_parent
from radixfleet.flags import PREFIX
from radixfleet.models import SMALL_MODEL_NAME
from radixfleet.options import ServeOptions
from radixfleet.supervise import ChildSpec

SECRETS = frozenset(PREFIX + name for name in ("API_KEY", "ADMIN_API_KEY", "LAUNCH_KEY", "SSL_KEYFILE_PASSWORD"))
MAX_TEXT_THREADS = 4
RAY_WORKER_BIND = "tcp://0.0.0.0:5560"


@dataclass(frozen=True)
class Front:
    """What the tokenizers get from the launcher: a listening socket each, on `address`, and its key."""

    fds: Sequence[int]
    address: tuple[str, int] | None = None
    key: str = ""


def child_specs(
    options: ServeOptions, model: Path, folder: Path, front: Front, modules: Mapping[str, str] = MODULES
) -> list[ChildSpec]:
    """scheduler, detokenizer, workers, tokenizers.

              tokenizer.sock        detokenizer.sock       text.sock
    tokenizer ------------> scheduler <------------ detokenizer <------------ tokenizer
                                ^ worker.sock (or --worker-bind)
                              workers
    """
    base = environment({**os.environ, **options.variables})
    base.update(_settings(options, model, folder))
    on_ray = options.launcher == "ray"
    worker_bind = options.worker_bind or (RAY_WORKER_BIND if on_ray else _ipc(folder, "worker"))

    def spec(name: str, service: str, extra: Mapping[str, str] | None = None, **settings: str) -> ChildSpec:
        own = {PREFIX + key.upper(): value for key, value in settings.items()}
        known = base if service == "tokenizer" else {key: base[key] for key in base.keys() - SECRETS}
        env = {**known, PREFIX + "SERVICE_ID": name, **own, **(extra or {})}
        fds = (int(settings["http_fd"]),) if service == "tokenizer" else ()
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
            [_on_ray(options, base, worker_bind)]
            if on_ray
            else [
                spec(f"worker-{n}", "worker", _share(options, n), scheduler=_local(worker_bind))
                for n in range(options.workers)
            ]
        ),
        *(
            spec(name, "tokenizer", _door(options, front), scheduler=_ipc(folder, "tokenizer"), http_fd=str(fd))
            for name, fd in zip(tokenizer_names(len(front.fds)), front.fds, strict=True)
        ),
    ]


def _on_ray(options: ServeOptions, base: Mapping[str, str], worker_bind: str) -> ChildSpec:
    """One process that places all workers; `worker` is how its name begins, since it stops with them."""
    arguments = ["--workers", str(options.workers), "--scheduler", worker_bind, "--address", options.ray_address]
    if options.model_path:
        arguments += ["--model", options.model_path]
    if options.variable("device", "auto") == "cuda":
        arguments += ["--gpus", options.variable("tp_size", "1")]
    if options.variable("threads", "0") != "0":
        arguments += ["--cpus", options.variable("threads")]
    env = on_path({key: base[key] for key in base.keys() - SECRETS}, package_parent())
    return ChildSpec("workers-on-ray", [*command("radixfleet.launchers_ray"), *arguments], env)


def tokenizer_names(count: int) -> list[str]:
    return ["tokenizer"] if count == 1 else [f"tokenizer-{number}" for number in range(count)]


def _door(options: ServeOptions, front: Front) -> dict[str, str]:
    """Variables for every tokenizer; where there are several, they share the cores for tokenising."""
    settings = {"LAUNCH_KEY": front.key} if front.key else {}
    if front.address is not None:
        settings.update(HOST=front.address[0], PORT=str(front.address[1]))
    if len(front.fds) > 1 and not options.variable("text_threads"):
        cores = len(os.sched_getaffinity(0))
        settings["TEXT_THREADS"] = str(max(1, min(MAX_TEXT_THREADS, cores // len(front.fds))))
    return {PREFIX + name: value for name, value in settings.items()}


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
    return {
        PREFIX + "THREADS": str(
            max(1, len(os.sched_getaffinity(0)) // options.workers // int(options.variable("tp_size", "1")))
        )
    }


def visible_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """Names for CUDA_VISIBLE_DEVICES, one per GPU this process may use."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name.strip()]
    return [str(n) for n, _ in enumerate(sorted(devices.glob("nvidia[0-9]*")))]
