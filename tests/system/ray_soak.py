"""Two hosts of a Ray cluster, network namespaces with addresses of their own, and a cable between them that is pulled.

    python tests/system/ray_soak.py [--seconds 20]     actors far away
    python tests/system/ray_soak.py --learners         a learner on each, and gradients between them

A run on both learns on while the far actors are out of reach, and has them back in their places when the cable is in
again. Learners begin anew when it is. Needs root and iproute2; part of `make soak`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fleet_runs import SMALL, assert_goes_forward
from hosts_kit import Cable, free_port
from ray_kit import RayRun
from real_runs import ENVIRONMENT, records

RAY = str(Path(sys.executable).parent / "ray")
WORDS = ["train", "cartpole", "launcher=ray", *SMALL, "total_steps=1000000", "run.name=x", "eval.period_steps=null"]
FAR = ["actors=2", "ray.actor_resources={far: 0.1}", "checkpoint.period_steps=null"]
LEARNERS = ["sync=allreduce", "learners=2", "ray.learner_any_node=true", "ray.learner_cpus=1.5",
            "ray.evaluator_cpus=0.5", "allreduce.timeout_s=5", "checkpoint.period_steps=500"]


def start_ray(words: list[str], folder: Path, env: dict[str, str], within: list[str], stack: ExitStack) -> None:
    """`ray start`, ended by its own process when the stack is: `ray stop` would end every Ray of this user."""
    log = stack.enter_context((folder.parent / f"{folder.name}.txt").open("wb"))
    process = subprocess.Popen([*within, RAY, "start", *words, "--block", "--num-cpus=2", "--object-store-memory",
                                str(100 << 20), "--disable-usage-stats"], env=ENVIRONMENT | env, stdout=log, stderr=log)

    def end() -> None:
        process.terminate()
        process.wait(30)

    stack.callback(end)


def steps(run: RayRun) -> int:
    found = records(run.cwd / "runs" / "x") if (run.cwd / "runs" / "x" / "metrics.jsonl").exists() else []
    return found[-1]["step"] if found else 0


@contextmanager
def two_hosts(words: list[str]) -> Iterator[tuple[RayRun, Cable]]:
    """A Ray of two hosts, and a run on both that has taken a thousand steps."""
    with tempfile.TemporaryDirectory(prefix="qr", dir="/tmp") as name, ExitStack() as stack:
        folder = Path(name)
        token = folder / "token"
        token.touch(0o600)
        token.write_text(os.urandom(32).hex())
        env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        cable = Cable()
        stack.callback(cable.close)
        port = free_port(cable.here)
        start_ray(["--head", f"--node-ip-address={cable.here}", f"--port={port}", f"--temp-dir={folder / 'a'}",
                   "--include-dashboard=false"], folder / "a", env, [], stack)
        time.sleep(10)
        start_ray([f"--address={cable.here}:{port}", f"--node-ip-address={cable.there}", "--resources", '{"far": 1}'],
                  folder / "b", env, ["ip", "netns", "exec", cable.host], stack)
        run = stack.enter_context(RayRun([*WORDS, *words], folder, env | {"RAY_ADDRESS": f"{cable.here}:{port}"}))
        run.until(lambda: steps(run) > 1000)
        yield run, cable


def soak(words: list[str], seconds: float) -> None:
    with two_hosts(words) as (run, cable):
        cable.pull()
        since = time.monotonic()
        time.sleep(seconds)
        silent = steps(run)
        cable.plug()
        run.until(lambda: steps(run) > silent + 1000)
        print(f"cut for {seconds:g} s at step {silent:,}; 1,000 steps further after {time.monotonic() - since:.0f} s")
        print(run.complaints)
        last = records(run.cwd / "runs" / "x")[-1]
        print({tag: last.get(tag, 0) for tag in ("fleet/actors", "fleet/restarts", "wire/retries", "wire/duplicates",
                                                 "comm/bytes_per_update")})
        run.head.terminate()
        code, result = run.ended()
        assert code == 75 and result["saved_at"] == result["steps"], run.complaints
        assert_goes_forward(run.cwd / "runs" / "x")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--learners", action="store_true")
    args = parser.parse_args()
    soak(LEARNERS if args.learners else FAR, args.seconds)
