"""The Kubernetes examples: objects that fit together, and commands that qfleet takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from qfleet import __version__
from qfleet.cli.commands import find_command, parse
from qfleet.cli.options import fleet_overrides
from qfleet.cli.parsing import OVERRIDE
from qfleet.runconfig import resolution

EXAMPLES = Path(__file__).parents[2] / "examples" / "kubernetes"


def objects(name: str) -> dict[str, dict]:
    found = list(yaml.safe_load_all((EXAMPLES / name).read_text()))
    assert all({"apiVersion", "kind", "metadata", "spec"} <= each.keys() for each in found)
    return {f"{each['kind']} {each['metadata']['name']}": each["spec"] for each in found}


def pod(spec: dict) -> tuple[dict, dict]:
    """A pod's spec, and its one container."""
    inner = spec["template"]["spec"]
    [container] = inner["containers"]
    assert re.fullmatch(rf"registry\.example/qfleet(-ray)?:{re.escape(__version__)}", container["image"])
    assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
    assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
    mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
    assert mounted == {volume["name"] for volume in inner.get("volumes", [])}
    return inner, container


def taken(words: list[str]) -> list[str]:
    """The words of a qfleet command after the verb, which it must take; config and overrides are checked, too."""
    assert words[0] == "qfleet"
    args = parse(find_command(words[1]), words[2:])
    assert all(OVERRIDE.match(word) for word in args.overrides)
    if words[1] == "train":
        more = fleet_overrides(args, lambda given: resolution.resolve(args.words[0], given).config.has_children)
        resolution.resolve(args.words[0], [*args.overrides, *more])
    return words[2:]


def test_the_fleet_fits_together():
    found = objects("fleet.yaml")
    service = found["Service qfleet-head"]
    head, container = pod(found["Job qfleet-head"])
    actors, actor = pod(found["Deployment qfleet-actors"])
    assert service["selector"] == found["Job qfleet-head"]["template"]["metadata"]["labels"]
    deployment = found["Deployment qfleet-actors"]
    assert deployment["selector"]["matchLabels"] == deployment["template"]["metadata"]["labels"]
    for inner, each in ((head, container), (actors, actor)):
        secret = next(volume["secret"] for volume in inner["volumes"] if volume["name"] == "token")
        assert secret == {"secretName": "qfleet-token", "defaultMode": 0o400}, "read_token refuses what others can read"
        assert "/etc/qfleet" in [mount["mountPath"] for mount in each["volumeMounts"]]
    assert head["restartPolicy"] == "Never", "a podFailurePolicy asks for it"
    commands = [shlex.split(line.strip().removeprefix("exec ")) for line in container["args"][0].splitlines()
                if line.strip().startswith("exec ")]
    assert [words[1] for words in commands] == ["resume", "train"]
    join = taken(actor["command"])
    port = service["ports"][0]["port"]
    assert port == container["ports"][0]["containerPort"]
    for words in map(taken, commands):
        assert words[words.index("--listen") + 1] == f"0.0.0.0:{port}"
        assert words[words.index("--token-file") + 1] == join[join.index("--token-file") + 1] == "/etc/qfleet/token"
    assert join[0] == f"qfleet-head:{port}"
    planned = deployment["replicas"] * int(join[join.index("--actors") + 1])
    assert f"actors={planned}" in commands[1]


def test_exit_codes_mean_what_the_job_takes_them_for():
    [misused, saved] = objects("fleet.yaml")["Job qfleet-head"]["podFailurePolicy"]["rules"]
    assert (misused["action"], misused["onExitCodes"]["values"]) == ("FailJob", [2])
    assert (saved["action"], saved["onExitCodes"]["values"]) == ("Ignore", [75])


def test_the_ray_job_runs_a_command_of_ours_with_a_token():
    job = objects("kuberay.yaml")["RayJob qfleet-ray"]
    assert "launcher=ray" in taken(shlex.split(job["entrypoint"]))
    cluster = job["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"} and tuple(map(int, cluster["rayVersion"].split("."))) >= (2, 52)
    pod(cluster["headGroupSpec"])
    for group in cluster["workerGroupSpecs"]:
        pod(group)
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"] and group["groupName"]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_no_example_holds_a_secret(path):
    assert not re.search(r"kind: Secret|stringData|[0-9a-f]{32}", path.read_text())
