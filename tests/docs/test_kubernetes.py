"""The Kubernetes examples: objects that fit together, and commands that qfleet takes."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from qfleet import __version__
from qfleet.cli.commands import find_command, parse
from qfleet.cli.options import fleet_overrides
from qfleet.cli.parsing import OVERRIDE
from qfleet.runconfig import resolution
from qfleet.transport.security import read_token

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "kubernetes"
MOUNTED, COPY = "/etc/qfleet/token", "/home/qfleet/token"


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
    user = int(re.search(r"^RUN useradd .*--uid (\d+) ", (ROOT / "Dockerfile").read_text(), re.M)[1])
    assert inner["securityContext"] == {"runAsNonRoot": True, "runAsUser": user, "runAsGroup": user, "fsGroup": user}
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


def executed(container: dict) -> list[list[str]]:
    """The commands that the shell of a container may end in."""
    assert container["command"] == ["/bin/sh", "-c"]
    lines = [line.strip() for line in container["args"][0].splitlines()]
    return [shlex.split(line.removeprefix("exec ")) for line in lines if line.startswith("exec ")]


@pytest.mark.parametrize("name", ["Job qfleet-head", "Deployment qfleet-actors"])
def test_the_copy_of_the_token_can_be_read_by_its_user_only(name, tmp_path):
    _, container = pod(objects("fleet.yaml")[name])
    first = container["args"][0].splitlines()[0]
    secret, copy = tmp_path / "secret", tmp_path / "copy"
    secret.write_text("0123456789abcdef\n")
    secret.chmod(0o440)
    here = first.replace(MOUNTED, str(secret)).replace(COPY, str(copy))
    for _ in range(2):  # a container that restarts finds the copy
        subprocess.run(["sh", "-c", here], check=True, timeout=20)
        assert read_token(copy) == "0123456789abcdef"


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
        assert secret == {"secretName": "qfleet-token", "defaultMode": 0o440}, "readable by the group of the pod's user"
        assert "/etc/qfleet" in [mount["mountPath"] for mount in each["volumeMounts"]]
    assert head["restartPolicy"] == "Never", "a podFailurePolicy asks for it"
    commands, [joining] = executed(container), executed(actor)
    assert [words[1] for words in commands] == ["resume", "train"]
    join = taken(joining)
    port = service["ports"][0]["port"]
    assert port == container["ports"][0]["containerPort"]
    for words in map(taken, commands):
        assert words[words.index("--listen") + 1] == f"0.0.0.0:{port}"
        assert words[words.index("--token-file") + 1] == join[join.index("--token-file") + 1] == COPY
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


def test_docker_commands_fit_the_dockerfile():
    page = re.sub(r"\s*\\\n\s*", " ", (ROOT / "docs/kubernetes.md").read_text())
    shown = [line.partition("#")[0] for line in re.findall(r"^\$ docker (.*)$", page, re.M)]
    given = dict(re.findall(r"--build-arg (\w+)=(\S+)", " ".join(shown)))
    defaults = dict(re.findall(r"^ARG (\w+)=(\S+)$", (ROOT / "Dockerfile").read_text(), re.M))
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert given.keys() == defaults.keys() and {*given["EXTRAS"].split(","), defaults["EXTRAS"]} <= known.keys()
    built = {word for line in shown for word in re.findall(r"-t (\S+)", line) if line.startswith("build ")}
    used = set(re.findall(r"image: (\S+)", "".join(path.read_text() for path in EXAMPLES.glob("*.yaml"))))
    [started] = [line for line in shown if line.startswith("run ")]
    image, words = re.search(r"(registry\S+) (.*)", started).groups()
    assert used | {image} <= built
    taken(["qfleet", *shlex.split(words)])
