"""Flags: each one arrives somewhere, bad ones are refused with a reason, and help is cheap."""

from __future__ import annotations

import subprocess
import sys

import pytest

from radixfleet.flags import ALWAYS, ALWAYS_SWITCHES, PREFIX, REFUSED, Flag, all_flags
from radixfleet.options import ServeOptions, parse
from radixfleet.plan import Front, child_specs, visible_gpus
from shared.config import (
    DetokenizerConfig,
    SchedulerConfig,
    ServiceConfig,
    TokenizerConfig,
    WorkerConfig,
    load,
)

CONFIGS: tuple[type[ServiceConfig], ...] = (TokenizerConfig, SchedulerConfig, WorkerConfig, DetokenizerConfig)
# Set by the launcher for each service, or for tests alone.
INTERNAL = {
    "service_id",
    "health_bind",
    "reuse_port",
    "heartbeat_interval",
    "heartbeat_timeout",
    "model_path",
    "model_name",
    "scheduler",
    "http_fd",
    "launch_key",
    "host",
    "port",
    "tokenizer_bind",
    "detokenizer_bind",
    "worker_bind",
    "bind",
    "advertise",
    "tp_rank",
    "tp_meeting",
    "recompute",
    "kv_bind",
}


def sample(flag: Flag) -> list[str]:
    if flag.kind == "switch":
        return [flag.names[0]]
    if flag.choices:
        return [flag.names[0], flag.choices[-1]]
    return [flag.names[0], {"int": "3", "float": "0.5"}.get(flag.kind, "text")]


@pytest.mark.parametrize("flag", all_flags(), ids=lambda flag: flag.names[0])
def test_every_flag_reaches_a_field_of_a_service_or_the_launcher(flag: Flag) -> None:
    options = parse(sample(flag), environ={})
    if not flag.setting:
        assert getattr(options, flag.dest) != getattr(ServeOptions(), flag.dest)
        return
    readers = [config for config in CONFIGS if flag.setting in config.__struct_fields__]
    assert readers
    assert list(options.variables) == [PREFIX + flag.setting.upper()]
    for config in readers:
        value = getattr(load(config, environ=options.variables), flag.setting)
        assert value is not None
        if flag.kind != "switch" or flag.sets != "true":
            assert str(value).lower() == options.variables[PREFIX + flag.setting.upper()].lower()
        else:
            assert value is True


def test_every_setting_has_a_flag_or_is_internal() -> None:
    reachable = {flag.setting for flag in all_flags()}
    for config in CONFIGS:
        assert set(config.__struct_fields__) <= reachable | INTERNAL


def test_names_are_unique_across_all_tables() -> None:
    names = [name for flag in all_flags() for name in flag.names] + [*ALWAYS, *ALWAYS_SWITCHES, *REFUSED]
    assert len(names) == len(set(names))


def test_the_flags_of_the_seed_articles() -> None:
    command = "--model-path some/model --host 0.0.0.0 --port 30001 --log-level warning --enable-metrics"
    options = parse(command.split(), environ={})
    assert (options.model_path, options.host, options.port) == ("some/model", "0.0.0.0", 30001)
    assert options.variables == {"RADIXFLEET_LOG_LEVEL": "warning", "RADIXFLEET_ENABLE_METRICS": "true"}


def test_defaults_and_other_spellings() -> None:
    assert parse([], environ={}) == ServeOptions()
    assert parse(["some/model"], environ={}).model_path == "some/model"
    assert parse(["--model=some/model", "--dp-size=2"], environ={}).workers == 2
    assert parse(["--dtype", "half"], environ={}).variables == {"RADIXFLEET_DTYPE": "float16"}
    assert parse(["--disable-overlap-schedule"], environ={}).variables == {"RADIXFLEET_MAX_INFLIGHT_STEPS": "1"}
    assert parse(["--load-format", "gguf"], environ={}).variables == {"RADIXFLEET_LOAD_FORMAT": "auto"}


def test_flags_win_over_the_environment() -> None:
    environ = {"RADIXFLEET_MODEL_PATH": "from/env", "RADIXFLEET_PORT": "1234", "RADIXFLEET_HOST": "::1"}
    options = parse([], environ=environ)
    assert (options.model_path, options.port, options.host) == ("from/env", 1234, "::1")
    assert parse(["--port", "7", "from/flag"], environ=environ).port == 7
    assert parse(["from/flag"], environ=environ).model_path == "from/flag"


def test_what_is_the_case_anyway_is_accepted_and_does_nothing() -> None:
    words = ["--trust-remote-code", "--pp-size", "1", "--schedule-conservativeness", "0.8", "--grammar-backend", "auto"]
    assert parse(words, environ={}) == ServeOptions()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--modle-path", "x"], "did you mean --model-path?"),
        (["--nonsense"], "unknown flag --nonsense"),
        (["--enable-lora"], "--enable-lora: LoRA adapters"),
        (["--pp-size", "2"], "invalid choice: '2'"),
        (["--port", "many"], "'many' is not a number"),
        (["--workers", "0"], "0 is below 1"),
        (["--mem-fraction-static", "1.5"], "1.5 is above 1"),
        (["--schedule-policy", "random"], "invalid choice: 'random'"),
        (["--log-lev", "info"], "unknown flag --log-lev"),  # no silent abbreviations
    ],
)
def test_bad_flags_are_refused_with_a_reason(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(words, environ={})
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("words", [["serve", "--help"], ["--help"], ["--version"]])
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    code = (
        "import sys\nfrom radixfleet.cli import main\n"
        "try:\n    code = main(sys.argv[1:])\nexcept SystemExit as end:\n    code = end.code\n"
        "heavy = {'torch', 'numpy', 'transformers', 'tokenizers', 'httpx', 'zmq', 'fastapi', 'gguf'}\n"
        "print(code, sorted(heavy & set(sys.modules)))"
    )
    outcome = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert outcome.stdout.splitlines()[-1] == "0 []"


def test_the_services_get_their_settings_and_sockets(tmp_path: object) -> None:
    from pathlib import Path

    options = parse(["--workers", "2", "--threads", "3", "--page-size", "32", "a/b"], environ={})
    specs = {spec.name: spec for spec in child_specs(options, Path("/m"), Path("/r"), Front([7]))}
    assert list(specs) == ["scheduler", "detokenizer", "worker-0", "worker-1", "tokenizer"]
    scheduler = load(SchedulerConfig, environ=specs["scheduler"].env)
    worker = load(WorkerConfig, environ=specs["worker-1"].env)
    detokenizer = load(DetokenizerConfig, environ=specs["detokenizer"].env)
    tokenizer = load(TokenizerConfig, environ=specs["tokenizer"].env)
    assert worker.scheduler == scheduler.worker_bind == "ipc:///r/worker.sock"
    assert detokenizer.scheduler == scheduler.detokenizer_bind
    assert tokenizer.scheduler == scheduler.tokenizer_bind
    assert (worker.page_size, scheduler.page_size, worker.threads, worker.service_id) == (32, 32, 3, "worker-1")
    assert (tokenizer.model_path, tokenizer.model_name, tokenizer.http_fd) == ("/m", "a/b", 7)
    assert {name: spec.fds for name, spec in specs.items() if spec.fds} == {"tokenizer": (7,)}
    assert [name for name, spec in specs.items() if spec.announces] == ["worker-0", "worker-1", "tokenizer"]


def test_workers_elsewhere_join_over_tcp() -> None:
    from pathlib import Path

    options = parse(["--worker-bind", "tcp://0.0.0.0:5560"], environ={})
    specs = {spec.name: spec for spec in child_specs(options, Path("/m"), Path("/r"), Front([7]))}
    assert load(SchedulerConfig, environ=specs["scheduler"].env).worker_bind == "tcp://0.0.0.0:5560"
    assert load(WorkerConfig, environ=specs["worker-0"].env).scheduler == "tcp://127.0.0.1:5560"


def test_several_tokenizers_share_the_port_and_only_they_know_secrets() -> None:
    from pathlib import Path

    words = ["--http-workers", "2", "--api-key", "k1", "--api-key=k2,k3", "--admin-api-key", "secret"]
    options = parse(words, environ={})
    front = Front([7, 8], ("127.0.0.1", 5), "own")
    specs = {spec.name: spec for spec in child_specs(options, Path("/m"), Path("/r"), front)}
    assert [name for name in specs if name.startswith("tokenizer")] == ["tokenizer-0", "tokenizer-1"]
    for name, fd in (("tokenizer-0", 7), ("tokenizer-1", 8)):
        assert specs[name].fds == (fd,)
        config = load(TokenizerConfig, environ=specs[name].env)
        assert (config.http_fd, config.port, config.api_key) == (fd, 5, "k1,k2,k3")
        assert (config.admin_api_key, config.launch_key) == ("secret", "own")
        assert config.text_threads >= 1
    for name in ("scheduler", "detokenizer", "worker-0"):
        assert not {"k1,k2,k3", "secret", "own"} & set(specs[name].env.values())


def test_each_worker_gets_a_gpu_of_its_own(tmp_path: object) -> None:
    from pathlib import Path

    devices = Path(str(tmp_path))
    assert visible_gpus({}, devices) == []
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (devices / name).touch()
    assert visible_gpus({}, devices) == ["0", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3,GPU-x"}, devices) == ["3", "GPU-x"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, devices) == []
