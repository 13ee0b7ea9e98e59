"""The kustomizations render, validate against the schemas of Kubernetes, and say what the services understand."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from radixfleet.keygen import KINDS
from services.tokenizer import exposition
from shared.config import PREFIX, DetokenizerConfig, SchedulerConfig, ServiceConfig, TokenizerConfig, WorkerConfig, load
from tests.deploy.kustomize import Object, identity, render, render_with_kubectl

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
KUSTOMIZATIONS = ("base", "overlays/cuda", "overlays/keda", "overlays/tensor-parallel")
VERSION = "1.32"
SCHEMAS = Path(__file__).with_name("schemas")
CONFIGS: dict[str, type[ServiceConfig]] = {
    "scheduler": SchedulerConfig,
    "tokenizer": TokenizerConfig,
    "detokenizer": DetokenizerConfig,
    "gpu-worker": WorkerConfig,
}
COMPONENT = "app.kubernetes.io/component"


@pytest.fixture(params=KUSTOMIZATIONS)
def objects(request: pytest.FixtureRequest) -> list[Object]:
    return render(FOLDER / request.param)


def pod_templates(objects: list[Object]) -> Iterator[Object]:
    for item in objects:
        if item["kind"] == "Deployment":
            yield item["spec"]["template"]
        elif item["kind"] == "LeaderWorkerSet":
            yield item["spec"]["leaderWorkerTemplate"]["workerTemplate"]


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_kubectl_renders_the_same(name: str) -> None:
    theirs = render_with_kubectl(FOLDER / name)
    ours = render(FOLDER / name)
    assert len({identity(item) for item in ours}) == len(ours)
    if theirs is not None:
        assert {identity(item): item for item in theirs} == {identity(item): item for item in ours}


def test_every_object_validates(objects: list[Object]) -> None:
    for item in objects:
        schema = SCHEMAS / f"{item['kind']}.json"
        if schema.is_file():
            jsonschema.validate(item, json.loads(schema.read_text()))
        else:
            kubernetes_validate.validate(item, VERSION, strict=True)
    for template in pod_templates(objects):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": template["spec"]}
        kubernetes_validate.validate(pod, VERSION, strict=True)


def test_a_mistake_would_be_found() -> None:
    deployment = next(item for item in render(FOLDER / "base") if item["kind"] == "Deployment")
    deployment["spec"]["replicas"] = "2"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, VERSION, strict=True)


def test_the_services_take_their_settings(objects: list[Object]) -> None:
    maps = {item["metadata"]["name"]: item["data"] for item in objects if item["kind"] == "ConfigMap"}
    for template in pod_templates(objects):
        (container,) = template["spec"]["containers"]
        config = CONFIGS[container["name"]]
        variables = {
            name: value
            for source in container["envFrom"]
            for name, value in maps[source["configMapRef"]["name"]].items()
        }
        variables |= {entry["name"]: entry.get("value", "x") for entry in container["env"]}
        known = {PREFIX + field.upper() for kind in CONFIGS.values() for field in kind.__struct_fields__}
        assert {name for name in variables if name.startswith(PREFIX)} <= known
        flags = [word for word in container.get("command", ()) if word.startswith("--")]
        loaded = load(config, [re.sub(r"\$\(\w+\)", "2", flag) for flag in flags], variables)
        assert loaded.curve_dir == "/var/lib/radixfleet/keys"


def test_endpoints_ports_and_policies_agree(objects: list[Object]) -> None:
    services = {item["metadata"]["name"]: item for item in objects if item["kind"] == "Service"}
    doors = {port["port"]: port["name"] for port in services["scheduler"]["spec"]["ports"]}
    policies = [item["spec"] for item in objects if item["kind"] == "NetworkPolicy"]
    open_to = {
        (
            policy["podSelector"]["matchLabels"].get(COMPONENT),
            port["port"],
            peer["podSelector"]["matchLabels"][COMPONENT],
        )
        for policy in policies
        for rule in policy.get("ingress", ())
        for peer in rule.get("from", ())
        for port in rule.get("ports", ())
    }
    assert {(port, who) for to, port, who in open_to if to == "scheduler"} == {
        (5550, "tokenizer"),
        (5551, "detokenizer"),
        (5560, "gpu-worker"),
    }
    for template in pod_templates(objects):
        (container,) = template["spec"]["containers"]
        for entry in container["env"]:
            if entry["name"] == "RADIXFLEET_SCHEDULER":
                port = int(entry["value"].rpartition(":")[2])
                assert doors[port]
                assert ("scheduler", port, container["name"]) in open_to


def test_pods_are_confined_and_hold_their_own_key_alone(objects: list[Object]) -> None:
    for template in pod_templates(objects):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        for container in [*spec["containers"], *spec["initContainers"]]:
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["securityContext"]["readOnlyRootFilesystem"]
        (keys,) = (volume["secret"] for volume in spec["volumes"] if volume["name"] == "keys")
        names = {item["key"] for item in keys["items"]}
        kind = template["metadata"]["labels"][COMPONENT].removeprefix("gpu-")
        assert names == {f"{kind}.key" for kind in KINDS} | {f"{kind}.key_secret"}


def test_selectors_find_their_pods(objects: list[Object]) -> None:
    labels = [template["metadata"]["labels"] for template in pod_templates(objects)]
    for item in objects:
        selector: dict[str, Any] = item.get("spec", {}).get("selector") or item.get("spec", {}).get("podSelector") or {}
        wanted = selector.get("matchLabels", selector)
        assert any(wanted.items() <= found.items() for found in labels), identity(item)


def test_what_waits_is_measured() -> None:
    """The queries of the autoscaler name metrics that /metrics has."""
    scaled = next(item for item in render(FOLDER / "overlays/keda") if item["kind"] == "ScaledObject")
    source = Path(exposition.__file__).read_text()
    for trigger in scaled["spec"]["triggers"]:
        for name in re.findall(r"radixfleet_(\w+)", trigger["metadata"]["query"]):
            assert f'"{name}"' in source
