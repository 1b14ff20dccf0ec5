"""The command `submit slurm`: submits a run to a Slurm cluster."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from qfleet.cli.output import print_error, print_line, print_result

if TYPE_CHECKING:
    from qfleet.launch.slurm import JobLayout, JobSize, SlurmJob
    from qfleet.runconfig.run_config import RunConfig


def submit(args: Namespace) -> int:
    """Write a batch script and submit it to Slurm, print it (--dry-run) or run it on this machine (--local)."""
    from qfleet.core.errors import UserError
    from qfleet.launch import slurm

    if args.words[0] != "slurm":
        raise UserError(f"{args.words[0]!r} is not a supported cluster: write `qfleet submit slurm RECIPE ...`; "
                        "for Kubernetes see docs/kubernetes.md")
    job = job_of(args)
    if args.dry_run:
        print_line(slurm.script(job, args.local).rstrip())
        return 0
    with slurm.script_written(job, args.local):
        if args.local:
            print_error(f"{job.size.tasks} task{'s' * (job.size.tasks != 1)} on this machine; Ctrl-C stops them")
            slurm.exec_locally(job)
        number = slurm.submit_job(job)
    lines = [("job", number), ("output", str(job.output)), ("script", str(job.script)),
             ("watch", f"qfleet top {job.run}"), ("cancel", f"scancel {number}")]
    print_result(args, [*(f"{name:<10} {text}" for name, text in lines), str(job.run)],
                 {"job": number, "directory": str(job.run), "output": str(job.output), "script": str(job.script)})
    return 0


def job_of(args: Namespace) -> SlurmJob:
    """Return the job for the arguments and options; UserError for a job that would fail on the cluster."""
    from qfleet.core.errors import UserError
    from qfleet.launch.slurm import SlurmJob
    from qfleet.launch.topology import actor_assignment
    from qfleet.runconfig import resolution
    from qfleet.runs.directory import RunDirectory
    from qfleet.runs.find import require_no_outside_links, require_trusted

    source, run = args.words[1], _existing_run(args.words[1])
    overrides = list(args.overrides)
    if run is not None and not args.trust:
        require_trusted(RunDirectory(run))
        require_no_outside_links(RunDirectory(run))
    resolved = resolution.resolve(source if run is None else str(run / "config.yaml"), overrides)
    size = _size(args, resolved.config)
    layout = _layout(resolved.config, size.tasks)
    if extra := _implied(layout, size, resolved.config, resolved.provenance):
        overrides += extra
        resolved = resolution.resolve(source if run is None else str(run / "config.yaml"), overrides)
    config = resolved.config
    _check(args, layout, size, config)
    train: list[str] = []
    if run is None:
        root = Path(config.run.root).expanduser() / (args.prefix or "")
        run = (root / _name(args, config)).absolute()
        if run.exists():
            raise UserError(f"{run} exists already: resume it with `qfleet submit slurm {run}`, or choose another "
                            "--name")
        train = ["train", source, *overrides, f"run.root={json.dumps(str(run.parent))}",
                 f"run.name={json.dumps(run.name)}"]
        overrides = []
    elif args.name or args.prefix:
        raise UserError(f"{run} has a name already: leave out --name and --prefix")
    # A resume on another node cannot verify that the run was created there; it has been verified above.
    return SlurmJob(
        layout, run, size, train, ["resume", str(run), "--trust", *overrides],
        [sys.executable, "-m", "qfleet"], _joining(config, size), actor_assignment(config).actors,
        config.allreduce.max_restarts, config.ray.object_store_mb, args.partition, args.time, args.sbatch)


def _existing_run(source: str) -> Path | None:
    """Return the run directory if `source` is one."""
    path = Path(source).expanduser()
    return path.absolute() if path.is_dir() and (path / "config.yaml").is_file() else None


def _name(args: Namespace, config: RunConfig) -> str:
    from qfleet.config import validate
    from qfleet.runs.directory import RunSection, default_name

    if args.name:
        validate(RunSection, {"name": args.name}, "--name")
    return str(args.name or config.run.name or default_name(config.env.id, config.agent.algo, config.seed))


def _layout(config: RunConfig, tasks: int) -> JobLayout:
    if config.launcher_traits.cluster == "ray":  # Ray places the learners itself
        return "ray"
    if config.synchronous and config.learners_act:
        return "ranks"
    return "fleet" if tasks > 1 and not config.synchronous and not config.has_server else "node"


def _size(args: Namespace, config: RunConfig) -> JobSize:
    from qfleet.core.errors import UserError
    from qfleet.launch.slurm import JobSize
    from qfleet.launch.topology import actor_assignment

    nodes, tasks, per_node = args.nodes, args.ntasks, args.ntasks_per_node
    if per_node is None:
        each = max(1, args.gpus_per_node) if config.synchronous else actor_assignment(config).learners
        per_node = each if tasks is None else -(-tasks // nodes)
    tasks = nodes * per_node if tasks is None else tasks
    if not nodes <= tasks <= nodes * per_node:
        raise UserError(f"--ntasks {tasks} does not fit --nodes {nodes} with --ntasks-per-node {per_node}: choose from "
                        f"{nodes} to {nodes * per_node}, or leave out --ntasks-per-node")
    return JobSize(nodes, tasks, per_node, args.cpus_per_task, args.gpus_per_node)


def _implied(layout: JobLayout, size: JobSize, config: RunConfig, given: Mapping[str, str]) -> list[str]:
    """Overrides that follow from the size of the job, for keys that the config does not set."""
    from qfleet.config import DEFAULT

    if layout == "fleet" and given.get("actors", DEFAULT) == DEFAULT:
        return [f"actors={(size.tasks - 1) * size.cpus}"]
    if layout == "node" and config.has_server and given.get("learners", DEFAULT) == DEFAULT:
        return [f"learners={size.tasks}"]
    return []


def _check(args: Namespace, layout: JobLayout, size: JobSize, config: RunConfig) -> None:
    from qfleet.core.errors import UserError
    from qfleet.launch.topology import actor_assignment

    tasks, assignment = size.tasks, actor_assignment(config)
    learners, actors = assignment.learners, assignment.actors
    problems = []
    if layout == "node" and config.has_server:
        if size.nodes > 1:
            problems.append(f"--nodes {size.nodes} with sync=server: learners and shards of a parameter server "
                            "share one host; use --nodes 1, or sync=allreduce")
        if tasks not in (1, learners):
            problems.append(f"--ntasks {tasks} with learners={learners}: each task is one learner; leave out "
                            "one of them")
    if layout == "node" and config.synchronous and tasks > 1:
        problems.append(f"--ntasks {tasks} with sync={config.sync} and actors={actors}: learners and actors share one "
                        "task; use --nodes 1 --ntasks 1, or set actors=0, so that each task is a learner that acts")
    if layout == "fleet" and actors < tasks - 1:
        problems.append(f"actors={actors} cannot be divided among {tasks - 1} tasks that join: raise actors or "
                        "lower --ntasks")
    if layout == "ranks" and tasks != size.nodes * size.per_node:
        problems.append(f"--ntasks {tasks} on --nodes {size.nodes}: all nodes run the same number of ranks; choose a "
                        "multiple")
    if layout == "ranks" and learners not in (1, tasks):
        problems.append(f"learners={learners} with --ntasks {tasks}: each task is one learner; leave out "
                        "learners")
    if size.gpus and config.device == "cpu":
        problems.append(f"--gpus-per-node {size.gpus} with device=cpu: the GPUs would be unused; leave out one of them")
    requested = size.gpus or args.local or any("gpu" in option or "gres" in option for option in args.sbatch)
    if config.device.startswith("cuda") and not requested:
        problems.append(f"device={config.device} without --gpus-per-node: Slurm would give the job no GPU; add "
                        "--gpus-per-node 1")
    if layout == "ray":
        problems += _ray_problems(size, config)
    if args.local and size.nodes > 1:
        problems.append(f"--local is one machine: use --nodes 1 instead of {size.nodes}")
    if problems:
        raise UserError("\n".join(problems))


def _ray_problems(size: JobSize, config: RunConfig) -> list[str]:
    """Requests for CPUs that Ray could never satisfy."""
    from qfleet.launch.topology import Role, topology

    nodes, node = topology(config), size.per_node * size.cpus
    packed = sum(each.resources["CPU"] for each in nodes if each.role is not Role.ACTOR)
    actor = max((each.resources["CPU"] for each in nodes if each.role is Role.ACTOR), default=0)
    if packed + actor <= node * size.nodes and (config.ray.learner_any_node or packed <= node):
        return []
    return [f"--cpus-per-task {size.cpus} with launcher=ray: the learner and the processes on its node request "
            f"{packed:g} CPUs of a node, an actor {actor:g}, and a node of the job has {node}; raise --cpus-per-task"]


def _joining(config: RunConfig, size: JobSize) -> list[str]:
    """Additional arguments for `qfleet join`."""
    from qfleet.runs.find import acting_part, foreign_names

    fleet = config.fleet
    words = ["--tls-ca", str(Path(fleet.tls_cert).absolute())] if fleet.tls_cert else []
    if not words and size.nodes > 1 and foreign_names(acting_part(config.model_dump(mode="json"))):
        words = ["--trust"]  # the modules that it names belong to the user who submits the job
    return words
