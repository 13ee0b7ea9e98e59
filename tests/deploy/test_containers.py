"""The compose files and images without an engine: valid, scalable, and in the services' own words."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_spec import PyCompose

from radixfleet.cli import main
from shared.config import PREFIX, DetokenizerConfig, SchedulerConfig, ServiceConfig, TokenizerConfig, WorkerConfig, load
from shared.service import new_service_id
from tests.deploy.kustomize import _merge

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
CONFIGS: dict[str, type[ServiceConfig]] = {
    "scheduler": SchedulerConfig,
    "tokenizer": TokenizerConfig,
    "detokenizer": DetokenizerConfig,
    "gpu_worker": WorkerConfig,
}
PLACEHOLDER = re.compile(r"\$\{(\w+):-([^}]*)\}")


def compose(*names: str) -> dict[str, Any]:
    """The files, merged, with every variable at its default."""
    merged: dict[str, Any] = {}
    for name in names:
        text = PLACEHOLDER.sub(lambda match: match[2], (ROOT / name).read_text())
        merged = _merge(merged, yaml.safe_load(text))
    return {key: value for key, value in merged.items() if not key.startswith("x-")}


FILES = [("docker-compose.yml",), ("docker-compose.yml", "docker-compose.cuda.yml")]


@pytest.mark.parametrize("names", FILES)
def test_the_files_are_valid(names: tuple[str, ...]) -> None:
    PyCompose.from_yaml(yaml.safe_dump(compose(*names))).to_spec()


def test_a_mistake_would_be_found() -> None:
    wrong = compose("docker-compose.yml")
    wrong["services"]["scheduler"]["helthcheck"] = {}
    with pytest.raises(Exception, match="helthcheck"):
        PyCompose.from_yaml(yaml.safe_dump(wrong)).to_spec()


def test_older_compose_reads_them_too() -> None:
    """docker-compose 1.29 knows no `name:` or `include:`, and long durations and conditions as they stand here."""
    for name, *_ in FILES:
        text = (ROOT / name).read_text()
        assert not re.search(r"^(version|name|include):", text, re.M)


@pytest.mark.parametrize("names", FILES)
def test_everything_that_scales_can(names: tuple[str, ...]) -> None:
    services = compose(*names)["services"]
    for name in CONFIGS:
        assert "container_name" not in services[name]
        assert "ports" not in services[name], "a published port has room for one replica"
    assert services["tokenizer"]["network_mode"] == "service:port"
    (published,) = services["port"]["ports"]
    assert published == "127.0.0.1:30000:30000"


@pytest.mark.parametrize("names", FILES)
def test_the_services_take_their_settings(names: tuple[str, ...]) -> None:
    services = compose(*names)["services"]
    known = {PREFIX + field.upper() for kind in CONFIGS.values() for field in kind.__struct_fields__}
    for name, config in CONFIGS.items():
        variables = {key: str(value) for key, value in services[name]["environment"].items()}
        assert set(variables) <= known
        assert load(config, environ=variables).curve_dir
        assert services[name]["stop_grace_period"] == "45s"
        assert float(variables["RADIXFLEET_DRAIN_TIMEOUT"]) < 45


def test_every_service_has_its_image() -> None:
    dockerfile = (DOCKER / "Dockerfile").read_text()
    targets = re.findall(r"^FROM \S+ AS (\w+)$", dockerfile, re.M)
    for name, service in compose("docker-compose.yml")["services"].items():
        if "build" in service:
            assert service["build"]["target"] == name
            assert name in targets
    for stage in ("service", "gpu_worker"):  # what builds does so as root; what runs does not
        body = dockerfile.split(f" AS {stage}\n")[1].split("\nFROM ")[0]
        assert body.rindex("\nUSER radixfleet") > body.rindex("\nRUN ")
    for variable in re.findall(r"RADIXFLEET_\w+", dockerfile):
        known = {PREFIX + field.upper() for kind in CONFIGS.values() for field in kind.__struct_fields__}
        assert variable in known | {"RADIXFLEET_CACHE"}


def test_three_images_have_no_torch() -> None:
    """Their stages copy the environment that was built from the dependencies without any extra."""
    for extra, wanted in (((), False), (("worker",), True)):
        folder_script = DOCKER / "requirements.py"
        source = folder_script.read_text().replace(
            'Path(__file__).with_name("pyproject.toml")', f"Path({str(ROOT / 'pyproject.toml')!r})"
        )
        done = subprocess.run([sys.executable, "-c", source, *extra], capture_output=True, text=True, check=True)
        assert ("torch" in done.stdout) is wanted


def test_each_replica_claims_a_gpu_of_its_own(tmp_path: Path) -> None:
    program = [sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True); input()"]
    command = [sys.executable, str(DOCKER / "claim_gpu.py"), str(tmp_path), *program]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "0,2"}

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    replicas = [start(), start()]
    try:
        assert {replica.stdout.readline().strip() for replica in replicas if replica.stdout} == {"0", "2"}
        third = start()
        assert "all of the 2 GPUs" in third.communicate()[1]
        assert third.returncode == 1
        replicas[0].kill()
        replicas[0].communicate()
        replicas.append(start())
        assert replicas[-1].stdout is not None
        assert replicas[-1].stdout.readline().strip() in {"0", "2"}
    finally:
        for replica in replicas:
            replica.kill()
            replica.communicate()


def test_prepare_makes_keys_and_a_link_to_the_model(tmp_path: Path) -> None:
    model = tmp_path / "some"
    model.mkdir()
    (model / "config.json").write_text("{}")
    link = tmp_path / "models" / "current"
    words = ["prepare", "--keys", str(tmp_path / "keys"), "--model-path", str(model), "--model-link", str(link)]
    for _ in range(2):
        assert main(words) == 0
        assert link.resolve() == model
        assert len(list((tmp_path / "keys").iterdir())) == 8


def test_replicas_are_named_after_their_hosts() -> None:
    assert new_service_id("worker", WorkerConfig(service_id="@host")) == f"worker-{os.uname().nodename}"
