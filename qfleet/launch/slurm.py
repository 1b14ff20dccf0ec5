"""A run as a job of Slurm: the text of its batch script, and how it is handed over.

The script is a head of `#SBATCH` lines, the settings of this job, and `slurm.sh`, which is the same for all jobs.
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
"""So long before the end of its time a job is told to save."""

ANSWER_S = 120.0
CANCELLED = "cancelled() { :; }  # scancel has told all tasks; and a function of the user's environment is not called\n"
HERE = Path(__file__).parent


@dataclass(frozen=True)
class JobSize:
    """What a job asks Slurm for: `tasks` in all, at most `per_node` on a node, `cpus` for each, `gpus` for a node."""

    nodes: int = 1
    tasks: int = 1
    per_node: int = 1
    cpus: int = 1
    gpus: int = 0

    @property
    def steps(self) -> tuple[int, int, int]:
        """Tasks, tasks on a node and CPUs of each, where one process on a node sees to all that is done there."""
        return self.nodes, 1, self.per_node * self.cpus


@dataclass(frozen=True)
class SlurmJob:
    """One run under Slurm. `train` begins it and `resume` goes on with it, as words for qfleet; no `train`: it exists.

    `join` are further words for those who join, `actors` is how many they start together, `restarts` how often
    ranks are started anew, `object_store_mb` how much Ray may keep under way, `sbatch` are options for Slurm as they
    are.
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
        """What belongs to the job and not to the run: script, output, and while it lives its token."""
        return self.run.parent / "slurm" / self.run.name

    @property
    def script(self) -> Path:
        return self.folder / "job.sh"

    @property
    def output(self) -> Path:
        return self.folder / "out.txt"


def script(job: SlurmJob, local: bool = False) -> str:
    """The batch script; `local` runs the same without Slurm."""
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
    return [*map(_sbatch_word, found), *job.sbatch]


def _sbatch_word(option: str) -> str:
    """sbatch splits at blanks and takes % for a number of the job; both are put in their place."""
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
            *(f"{name}=({shlex.join(words)})" for name, words in (
                ("qfleet", job.qfleet), ("train", job.train), ("resume", job.resume), ("join", job.join)))]


def write(job: SlurmJob, local: bool = False) -> Path:
    """Put the script where all nodes find it."""
    try:
        job.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _place(job, script(job, local))
    except OSError as error:
        raise UserError(f"cannot write the job {job.folder}: {error.strerror}; choose a folder that all nodes see and "
                        "you may write to with run.root") from error
    return job.script


def _place(job: SlurmJob, text: str | None) -> None:
    """Replace the script, or remove it."""
    beside = job.script.with_suffix(".new")
    try:
        if text is None:
            job.script.unlink(missing_ok=True)
        else:
            beside.write_text(text)
            beside.replace(job.script)  # the shell of an earlier job may still read the old one
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def script_written(job: SlurmJob, local: bool = False) -> Iterator[None]:
    """The script lies in its place; if what is done with it fails, everything is as it was before."""
    new = [path for path in (job.folder, *job.folder.parents) if not path.exists()]
    before = job.script.read_text() if job.script.is_file() else None
    try:
        write(job, local)
        yield
    except BaseException:
        with suppress(OSError):
            _place(job, before)
        with suppress(OSError):  # a folder in which something has been put meanwhile stays
            for path in new:
                path.rmdir()
        raise


def submit_job(job: SlurmJob) -> str:
    """Give a written job to Slurm; its number there."""
    if shutil.which("sbatch") is None:
        raise UserError("sbatch is not found: call this on a login node of a Slurm cluster; or see the script with "
                        "--dry-run, or run its tasks on this machine with --local")
    try:
        done = subprocess.run(["sbatch", "--parsable", str(job.script)], capture_output=True, text=True,
                              timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        raise UserError(f"sbatch did not answer for {ANSWER_S:.0f} s: `scontrol ping` says whether slurmctld lives, "
                        "`squeue --me` whether it took the job all the same, which would then fail") from None
    if done.returncode:
        why = "; ".join(line.removeprefix("sbatch: error: ") for line in done.stderr.strip().splitlines())
        raise UserError(f"sbatch refused the job: {why}; `sinfo` lists partitions and what their nodes have, --sbatch "
                        "OPTION adds what your cluster asks for, --sbatch=--account=NAME for instance")
    return done.stdout.strip().partition(";")[0]


def exec_locally(job: SlurmJob) -> NoReturn:
    """Become the batch shell of a job without Slurm."""
    os.execvp("bash", ["bash", str(job.script)])
