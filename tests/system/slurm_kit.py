"""A real Slurm for tests: munged, slurmctld and two slurmd on this host, in a folder of their own, without systemd."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hosts_kit import free_port
from real_runs import ENVIRONMENT

PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue")
needs_slurm = pytest.mark.skipif(os.geteuid() != 0 or not all(shutil.which(tool, path=PATH) for tool in TOOLS),
                                 reason="a Slurm of our own needs root and Debian's slurm-wlm and munge")
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
KillWait=90
MessageTimeout=60
SlurmdTimeout=600
BatchStartTimeout=120
MinJobAge=3600
SchedulerParameters=sched_interval=1
SlurmdParameters=config_overrides
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=16 RealMemory=1000
NodeName=other NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=16 RealMemory=1000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def command_of(place: Path) -> str:
    try:
        return (place / "cmdline").read_text(errors="replace")
    except OSError:
        return ""


class Slurm:
    """Two nodes, both this host, with more CPUs than there are, so that no test waits for another."""

    def __init__(self) -> None:
        self.host = os.uname().nodename.partition(".")[0]
        self.folder = Path(tempfile.mkdtemp(prefix="qfs-", dir="/tmp"))  # sockets have short names
        self.folder.chmod(0o755)
        self.config = self.folder / "slurm.conf"
        self.env = {name: value for name, value in ENVIRONMENT.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        self.env |= {"SLURM_CONF": str(self.config), "PATH": PATH}
        self.daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        ports = [free_port() for _ in range(3)]
        self.config.write_text(CONFIG.format(host=self.host, folder=self.folder, ports=ports))
        own = {option: self.folder / f"munge.{name}" for option, name in (
            ("--socket", "socket"), ("--key-file", "key"), ("--log-file", "log"), ("--pid-file", "pid"),
            ("--seed-file", "seed"))}
        self._daemon("munged", "--foreground", "--force", *(f"{option}={path}" for option, path in own.items()))
        self.until(own["--socket"].exists)
        self._daemon("slurmctld", "-D", "-c")
        for node in (self.host, "other"):
            self._daemon("slurmd", "-D", "-N", node)
        self.until(lambda: self.ask("sinfo", "--noheader", "--Node", "--format=%T").split() == ["idle", "idle"])

    def close(self) -> None:
        """End jobs, daemons and whoever else knows this cluster, and leave nothing."""
        with suppress(subprocess.SubprocessError):
            self.ask("scancel", "--full", "--user=root")
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(20)
            daemon.kill()
            daemon.wait()
        for pid in self.everybody():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _daemon(self, *words: str) -> None:
        with (self.folder / f"{words[0]}-{len(self.daemons)}.said").open("wb") as said:
            self.daemons.append(subprocess.Popen(words, env=self.env, stdin=subprocess.DEVNULL, stdout=said,
                                                 stderr=subprocess.STDOUT, start_new_session=True))

    def ask(self, *words: str, cwd: Path | None = None, timeout: float = 100) -> str:
        """What a command says; it may fail while the cluster starts."""
        return subprocess.run(words, env=self.env, cwd=cwd, capture_output=True, text=True, timeout=timeout).stdout

    def said(self) -> str:
        return "\n".join(f"{path}: {path.read_text(errors='replace')[-3000:]}" for path in self.folder.glob("*.said"))

    def until(self, ready: Callable[[], Any], timeout: float = 420, about: Path | None = None) -> Any:
        deadline = time.monotonic() + timeout
        while not (found := ready()):
            assert all(daemon.poll() is None for daemon in self.daemons), self.said()
            told = about.read_text(errors="replace") if about is not None and about.exists() else ""
            assert time.monotonic() < deadline, f"not in {timeout:g} s\n{told}\n{self.said()}"
            time.sleep(0.1)
        return found

    # ---- Jobs ----

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job: JobState, Restarts, Reason, ExitCode, ..."""
        words = self.ask("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def ends(self, number: str, state: str, about: Path) -> dict[str, str]:
        """Wait until a job is over, which must be in this way."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        found = self.until(lambda: (job := self.job(number)).get("JobState") in over and job, 900, about)
        assert found["JobState"] == state, f"{found}\n{about.read_text(errors='replace')}"
        self.until(lambda: not self.ask("squeue", "--noheader", "--states=all,CG", "--job", number, "--format=%T"
                                        ).strip().startswith("COMPLETING"), about=about)
        return found

    def warn(self, number: str) -> None:
        """As Slurm does when the time of a job is nearly up."""
        self.ask("scancel", "--signal=USR1", "--batch", number)

    def cut_short(self, number: str) -> None:
        """Give a job a time limit that is 60 to 120 s away, so that Slurm warns it when it looks next."""
        hours, minutes, seconds = map(int, self.job(number)["RunTime"].split(":"))
        limit = (hours * 3600 + minutes * 60 + seconds + 120) // 60
        self.ask("scontrol", "update", f"JobId={number}", f"TimeLimit={limit}")

    def requeued(self, number: str, about: Path) -> None:
        """Wait until a job was requeued and its first life is over."""
        self.until(lambda: (job := self.job(number)).get("Restarts") == "1" and job["JobState"] == "PENDING",
                   about=about)
        self.until(lambda: not self.everybody(number) and not self._stepds(number)
                   and not list(self.folder.glob(f"spool-*/job{int(number):05d}")), about=about)

    def lives_again(self, number: str, about: Path) -> None:
        """Do not wait the two minutes that Slurm does after requeuing."""
        # In the very second in which it ended, slurmd would take its new life for the old one, and refuse it.
        self.ask("scontrol", "update", f"JobId={number}", "StartTime=now+3", "TimeLimit=60")
        self.until(lambda: self.job(number)["JobState"] != "PENDING", about=about)

    def everybody(self, number: str | None = None) -> list[int]:
        """Processes of a job, or of all jobs and daemons."""
        mark = f"SLURM_CONF={self.config}".encode()
        of_job = None if number is None else f"SLURM_JOB_ID={number}".encode()
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                environ = (place / "environ").read_bytes().split(b"\0")
                if mark in environ and of_job in (None, *environ) and int(place.name) != os.getpid():
                    found.append(int(place.name))
        return found

    def _stepds(self, number: str) -> list[str]:
        """Slurm's own process for each step of a job; it cleans up after all others."""
        return [name for name in map(command_of, Path("/proc").glob("[0-9]*")) if f"slurmstepd: [{number}." in name]

    def assert_gone(self, number: str, folder: Path) -> None:
        """Nobody and nothing of a job is left, but its script and what it said."""
        self.until(lambda: not self.everybody(number))
        assert not list(Path("/tmp").glob(f"qf-{number}.*"))
        assert sorted(path.name for path in folder.iterdir()) == ["job.sh", "out.txt"]
