"""The manifests and work-pool templates, against the schemas that Kubernetes publishes. Nothing is run on a cluster."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from prefect.utilities.templating import apply_values

from flows.runners.workpool import job_variables
from stages.artifacts.s3_client import _ACTIONS
from stages.contract import Resources

INFRA = Path(__file__).parents[2] / "infra"
VERSION = "1.34"
MANIFESTS = sorted((INFRA / "kubernetes").glob("*.yaml"))


def documents() -> list[tuple[str, dict[str, Any]]]:
    return [(path.name, document) for path in MANIFESTS for document in yaml.safe_load_all(path.read_text())]


def validate(document: dict[str, Any]) -> None:
    kubernetes = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate holds the schemas")
    kubernetes.validate(document, VERSION, strict=True)


def pods() -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{name} {document['metadata']['name']}", document["spec"]["template"]["spec"])
        for name, document in documents()
        if document["kind"] in ("Deployment", "StatefulSet")
    ]


def test_every_manifest_fits_the_published_schema() -> None:
    assert len(documents()) == 12
    for _, document in documents():
        validate(document)


def test_the_schemas_find_a_field_that_there_is_not() -> None:
    document = dict(documents()[0][1])
    with pytest.raises(Exception, match="'specc' was unexpected"):
        validate(document | {"specc": {}})


def test_every_object_is_in_the_namespace_of_the_installation() -> None:
    for name, document in documents():
        if document["kind"] != "Namespace":
            assert document["metadata"]["namespace"] == "headrace", name


def test_pods_meet_the_restricted_security_standard() -> None:
    found = [*pods(), ("work pool", job()["spec"]["template"]["spec"])]
    assert len(found) == 5
    for name, pod in found:
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False, name
            assert context["readOnlyRootFilesystem"] is True, name
            assert context["capabilities"] == {"drop": ["ALL"]}, name
            assert "memory" in container["resources"]["limits"], name


def test_what_a_pod_refers_to_is_made_by_a_manifest_or_by_the_page() -> None:
    page = (INFRA / "kubernetes" / "README.md").read_text()
    made = {(document["kind"], document["metadata"]["name"]) for _, document in documents()}
    text = json.dumps([pod for _, pod in pods()] + [job()])
    for name in re.findall(r'"secretRef": \{"name": "([\w-]+)"|"secretKeyRef": \{"name": "([\w-]+)"', text):
        assert "".join(name) in page
    for name in re.findall(r'"configMapRef": \{"name": "([\w-]+)"', text):
        assert ("ConfigMap", name) in made
    for name in re.findall(r'"serviceAccountName": "([\w-]+)"', text):
        assert ("ServiceAccount", name) in made


def template(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((INFRA / "work-pools" / f"{kind}.json").read_text())
    return found


def filled(kind: str, resources: Resources) -> dict[str, Any]:
    """A pool's job configuration, filled in as a Prefect worker does it."""
    whole = template(kind)
    properties = whole["variables"]["properties"]
    values = {name: item["default"] for name, item in properties.items() if item.get("default") is not None}
    values |= {"name": "run-sft", "command": ["prefect", "flow-run", "execute"], "env": {}, "labels": {"a": "b"}}
    given = job_variables(kind, resources)
    assert set(given) <= set(properties)
    Draft202012Validator(whole["variables"]).validate({k: v for k, v in given.items()})
    return dict(apply_values(whole["job_configuration"], values | given, warn_on_notset=False))


def job(resources: Resources | None = None) -> dict[str, Any]:
    """The job that a Kubernetes worker makes of the template."""
    manifest: dict[str, Any] = filled("kubernetes", resources or Resources())["job_manifest"]
    container = manifest["spec"]["template"]["spec"]["containers"][0]
    # The worker itself turns a mapping of variables into the list that Kubernetes takes.
    container["env"] = [{"name": name, "value": value} for name, value in container["env"].items()]
    return manifest


@pytest.mark.parametrize("kind", ["docker", "kubernetes"])
def test_the_variables_of_a_work_pool_are_a_schema_and_each_is_used(kind: str) -> None:
    whole = template(kind)
    Draft202012Validator.check_schema(whole["variables"])
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(whole["job_configuration"])))
    assert used == set(whole["variables"]["properties"])
    for name, item in whole["variables"]["properties"].items():
        if "default" in item:
            Draft202012Validator(item).validate(item["default"])
        assert item["title"], name


def test_a_steps_resources_become_those_of_its_kubernetes_job() -> None:
    made = job(Resources(gpus=2, memory="16GiB", shm="2GiB", processes=2))
    validate(made)
    pod = made["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"] == {"memory": str(16 << 30), "nvidia.com/gpu": 2}
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(2 << 30)}} in pod["volumes"]
    assert pod["terminationGracePeriodSeconds"] > 60  # what a stage may take to save
    validate(job())


def test_a_steps_resources_become_those_of_its_container() -> None:
    made = filled("docker", Resources(gpus=2, memory="16GiB", shm="2GiB"))
    assert made["mem_limit"] == made["memswap_limit"] == f"{16 << 30}b"
    assert made["container_create_kwargs"]["shm_size"] == f"{2 << 30}b"
    assert made["container_create_kwargs"]["device_requests"] == [
        {"Driver": "nvidia", "Count": 2, "Capabilities": [["gpu"]]}
    ]
    assert filled("docker", Resources())["container_create_kwargs"]["device_requests"] == []


def test_the_policies_allow_what_the_store_does_and_no_more() -> None:
    def actions(name: str) -> set[str]:
        policy = json.loads((INFRA / "iam" / name).read_text())
        assert policy["Version"] == "2012-10-17"
        return {action for statement in policy["Statement"] for action in statement["Action"]}

    assert set(_ACTIONS.values()) <= actions("stage-policy.json")
    assert actions("reader-policy.json") == {"s3:ListBucket", "s3:GetObject"}
    assert not [action for action in actions("stage-policy.json") if "*" in action]
