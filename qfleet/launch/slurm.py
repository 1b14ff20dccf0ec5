"""Runs a training as a Slurm job: generates its batch script and submits it.

The script consists of `#SBATCH` lines, the settings of this job, and `slurm.sh`, which is the same for all jobs.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from qfleet.core.errors import UserError

JobLayout = Literal["node", "fleet", "ranks", "ray"]

WARNING_S = 120
"""Seconds before the end of its time limit at which a job is signalled to save."""

ANSWER_S = 120.0
CANCELLED = "cancelled() { :; }  # scancel signals all tasks; masks a function of the user's environment\n"
HERE = Path(__file__).parent


@dataclass(frozen=True)
class JobSize:
    """Resources of a job: `tasks` in all, at most `per_node` on a node, `cpus` for each, `gpus` for a node."""

    nodes: int = 1
    tasks: int = 1
    per_node: int = 1
    cpus: int = 1
    gpus: int = 0

    @property
    def steps(self) -> tuple[int, int, int]:
        """Tasks, tasks on a node and CPUs of each, for layouts with one process per node."""
        return self.nodes, 1, self.per_node * self.cpus


@dataclass(frozen=True)
class SlurmJob:
    """One run under Slurm.

    `train` and `resume` are qfleet arguments to start and to continue it; no `train`: it exists.

    `join` are further arguments of joining tasks, `actors` the number that they start together, `restarts` the limit
    of restarts of the ranks, `object_store_mb` Ray's object store, `sbatch` further options for Slurm, verbatim.
    """

    layout: JobLayout
    run: Path
    size: JobSize
    train: Sequence[str]
    resume: Sequence[str]
    qfleet: Sequence[str]
    join: Sequence[str] = ()
    actors: int = 0
    restarts: int = 0
    object_store_mb: int = 256
    partition: str | None = None
    time: str | None = None
    sbatch: Sequence[str] = ()

    @property
    def folder(self) -> Path:
        """Folder of the job, not of the run: script, output, and the token while it runs."""
        return self.run.parent / "slurm" / self.run.name

    @property
    def script(self) -> Path:
        return self.folder / "job.sh"

    @property
    def output(self) -> Path:
        return self.folder / "out.txt"


def script(job: SlurmJob, local: bool = False) -> str:
    """Batch script; `local` runs the same without Slurm."""
    parts = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(job)), "", *_settings(job), ""]
    parts += [(HERE / "slurm_local.sh").read_text() if local else CANCELLED]
    return "\n".join([*parts, (HERE / "slurm.sh").read_text()])


def _options(job: SlurmJob) -> list[str]:
    size = job.size
    found = [f"--job-name={job.run.name}", f"--nodes={size.nodes}", f"--ntasks={size.tasks}",
             f"--ntasks-per-node={size.per_node}", f"--cpus-per-task={size.cpus}"]
    found += [f"--gpus-per-node={size.gpus}"] if size.gpus else []
    found += [f"--partition={job.partition}"] if job.partition else []
    found += [f"--time={job.time}"] if job.time else []
    found += [f"--chdir={Path.cwd()}", f"--output={job.output}", "--open-mode=append", "--requeue",
              f"--signal=B:USR1@{WARNING_S}"]
    return [*map(_sbatch_option, found), *job.sbatch]


def _sbatch_option(option: str) -> str:
    """Quote an option: sbatch splits at blanks and expands % in file names."""
    name, _, value = option.partition("=")
    if name == "--output":
        value = value.replace("%", "%%")
    return f'{name}="{value}"' if " " in value else option if name != "--output" else f"{name}={value}"


def _settings(job: SlurmJob) -> list[str]:
    tasks, per_node, cpus = (job.size.tasks, job.size.per_node, job.size.cpus)
    if job.layout != "fleet":
        tasks, per_node, cpus = job.size.steps
    return [f"layout={job.layout}", f"run={shlex.quote(str(job.run))}", f"job={shlex.quote(str(job.folder))}",
            f"nodes={job.size.nodes} per_node={job.size.per_node} cpus={job.size.cpus} gpus={job.size.gpus}",
            f"tasks={tasks} tasks_per_node={per_node} task_cpus={cpus}",
            f"actors={job.actors} restarts={job.restarts} object_store_mb={job.object_store_mb}",
            f"export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{job.size.cpus}}}",
            *(f"{name}=({shlex.join(args)})" for name, args in (
                ("qfleet", job.qfleet), ("train", job.train), ("resume", job.resume), ("join", job.join)))]


def write(job: SlurmJob, local: bool = False) -> Path:
    """Write the script to a folder that all nodes see."""
    try:
        job.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _place(job, script(job, local))
    except OSError as error:
        raise UserError(f"cannot write the job {job.folder}: {error.strerror}; choose a folder that all nodes see and "
                        "you may write to with run.root") from error
    return job.script


def _place(job: SlurmJob, text: str | None) -> None:
    """Replace the script, or remove it."""
    temporary = job.script.with_suffix(".new")
    try:
        if text is None:
            job.script.unlink(missing_ok=True)
        else:
            temporary.write_text(text)
            temporary.replace(job.script)  # the shell of an earlier job may still be reading the old one
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def script_written(job: SlurmJob, local: bool = False) -> Iterator[None]:
    """While inside, the script exists; if an error occurs, everything is restored."""
    new = [path for path in (job.folder, *job.folder.parents) if not path.exists()]
    before = job.script.read_text() if job.script.is_file() else None
    try:
        write(job, local)
        yield
    except BaseException:
        with suppress(OSError):
            _place(job, before)
        with suppress(OSError):  # a folder that is no longer empty stays
            for path in new:
                path.rmdir()
        raise


def submit_job(job: SlurmJob) -> str:
    """Submit a written job to Slurm; returns its job id."""
    if shutil.which("sbatch") is None:
        raise UserError("sbatch is not found: call this on a login node of a Slurm cluster; or show the script with "
                        "--dry-run, or run its tasks on this machine with --local")
    try:
        result = subprocess.run(["sbatch", "--parsable", str(job.script)], capture_output=True, text=True,
                              timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        raise UserError(f"sbatch did not answer for {ANSWER_S:.0f} s: `scontrol ping` shows whether slurmctld is up, "
                        "`squeue --me` whether it accepted the job all the same, which would then fail") from None
    if result.returncode:
        reason = "; ".join(line.removeprefix("sbatch: error: ") for line in result.stderr.strip().splitlines())
        raise UserError(f"sbatch refused the job: {reason}; `sinfo` lists partitions and what their nodes have, "
                        "--sbatch OPTION adds what your cluster requires, --sbatch=--account=NAME for instance")
    return result.stdout.strip().partition(";")[0]


def exec_locally(job: SlurmJob) -> NoReturn:
    """Replace this process by the batch shell of a job, without Slurm."""
    os.execvp("bash", ["bash", str(job.script)])
