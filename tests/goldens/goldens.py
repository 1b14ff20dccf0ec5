"""Compare short trainings of the commit in tests/goldens/BASE and of the current tree, bit by bit.

    python tests/goldens/goldens.py [--only NAME ...] [--base COMMIT] [--keep]

Both trees run in this Python environment, side by side on this machine; BASE from a git worktree that is removed
afterwards. Weights, optimizer state, every other array of the last checkpoint and all metrics that are not timings must
be equal. base.yaml and current.yaml hold the commands of each tree, and the names that have changed since BASE.

Exit codes: 0 equal; 1 different, or a training failed; 2 the comparison cannot be made.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from golden_results import SHOWN, Incomplete, Names, Result, Rule, differences, read_result

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RULES = {"two-learners": Rule(evaluations=False), "server": Rule(evaluations=False, records=False)}
"""What differs from the usual rule, by name of the run."""

TIMEOUT_S = 120.0
TAIL_LINES = 30
THREADS = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")}
FOREIGN = ("SLURM_", "TORCHELASTIC_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "QFLEET_", "PYTHONPATH")
"""Variables, by how their names begin, that would change how a tree runs."""


class Impossible(Exception):
    """The comparison cannot be made here."""


class Failed(Exception):
    """A training ended with an error, or left nothing to compare."""


@dataclass(frozen=True)
class Table:
    """Commands of a tree, and how its names differ from those of the comparison."""

    commands: Mapping[str, Sequence[str]]
    tags: Names
    arrays: Names


@dataclass(frozen=True)
class Tree:
    """A source tree and its table; results are written below `out`."""

    label: str
    path: Path
    table: Table
    out: Path

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """Start a training of this tree in a process group of its own."""
        command = [sys.executable, "-m", "qfleet", "train", *self.table.commands[name], f"run.root={self.out}",
                   f"run.name={name}", "--quiet"]
        self.out.mkdir(exist_ok=True)
        with self.log(name).open("wb") as log:
            return subprocess.Popen(command, cwd=self.out, env=environment(self.path), stdin=subprocess.DEVNULL,
                                    stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def log(self, name: str) -> Path:
        return self.out / f"{name}.log"

    def result(self, name: str) -> Result:
        try:
            return read_result(self.out / name, self.table.tags, self.table.arrays)
        except (Incomplete, OSError, ValueError, KeyError) as error:
            raise Failed(f"the result of {self.label} cannot be compared: {error}") from error


def read_table(path: Path) -> Table:
    content: dict[str, Any] = yaml.safe_load(path.read_text())
    every = content["every"]
    return Table({name: [recipe, *every, *more] for name, (recipe, *more) in content["runs"].items()},
                 Names(**content["tags"]), Names(**content["arrays"]))


def environment(tree: Path) -> dict[str, str]:
    """Variables of a training: the tree comes before the installed package, one thread, no GPU, nothing foreign."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    return kept | THREADS | {"PYTHONPATH": str(tree), "CUDA_VISIBLE_DEVICES": ""}


def git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), "-c", "core.hooksPath=/dev/null", *arguments],
                              capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        raise Impossible("git is not installed, and the base commit is taken from the git history") from None
    if done.returncode:
        raise Impossible(f"git {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def find_commit(name: str) -> str:
    """The full hash of a commit of this repository."""
    git("rev-parse", "--git-dir")
    try:
        return git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    except Impossible:
        raise Impossible(f"this clone does not have commit {name}: fetch the whole history (git fetch --unshallow), "
                         "or name another commit with --base") from None


@contextmanager
def checked_out(commit: str, folder: Path) -> Iterator[Path]:
    """A worktree of a commit, removed at the end."""
    git("worktree", "add", "--quiet", "--detach", str(folder), commit)
    try:
        yield folder
    finally:
        git("worktree", "remove", "--force", str(folder))


def require_import(tree: Tree) -> None:
    """Fail unless a training of this tree imports qfleet from it."""
    done = subprocess.run([sys.executable, "-c", "import qfleet; print(qfleet.__file__)"], cwd=tree.path.parent,
                          env=environment(tree.path), capture_output=True, text=True, timeout=60)
    found = done.stdout.strip()
    if not found or not Path(found).is_relative_to(tree.path):
        raise Impossible(f"{tree.label}: qfleet is imported from {found or 'nowhere'}, not from {tree.path}"
                         f"{done.stderr[-500:]}")


def end(process: subprocess.Popen[bytes]) -> None:
    """End a training that still runs; kill its process group unless it leaves within five seconds."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def train(trees: Sequence[Tree], name: str) -> None:
    """Run the training of each tree at the same time."""
    until = time.monotonic() + TIMEOUT_S
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for tree in trees:
            processes.append(tree.start(name))
        for tree, process in zip(trees, processes, strict=True):
            try:
                code = process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise Failed(f"{tree.label} did not end within {TIMEOUT_S:g} s\n{tail(tree.log(name))}") from None
            if code:
                raise Failed(f"{tree.label} failed with exit code {code}\n{tail(tree.log(name))}")
    finally:
        for process in processes:
            end(process)


def tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
    return "\n".join(f"    | {line}" for line in lines)


def compare(base: Tree, now: Tree, name: str) -> bool:
    """Train and compare one run; print the outcome."""
    began = time.monotonic()
    try:
        train((base, now), name)
        results = base.result(name), now.result(name)
    except Failed as error:
        print(f"{name}: FAILED: {error}", flush=True)
        return False
    found = differences(*results, RULES.get(name, Rule()))
    if not found:
        print(f"{name}: equal, {len(results[0].arrays)} arrays after {results[0].updates} updates, "
              f"{len(results[0].records)} records ({time.monotonic() - began:.1f} s)", flush=True)
        return True
    print(f"{name}: DIFFERENT, {len(found)} differences", *found[:SHOWN], sep="\n    ", flush=True)
    if len(found) > SHOWN:
        print(f"    and {len(found) - SHOWN} more")
    return False


def compare_all(names: Sequence[str], commit: str, folder: Path) -> bool:
    base_table, table = (read_table(HERE / f"{which}.yaml") for which in ("base", "current"))
    with checked_out(commit, folder / "tree") as path:
        base = Tree(f"BASE ({commit[:7]})", path, base_table, folder / "base")
        now = Tree("the current tree", ROOT, table, folder / "current")
        for tree in (base, now):
            require_import(tree)
        return all([compare(base, now, name) for name in names])


def main(arguments: Sequence[str] | None = None) -> int:
    names = list(read_table(HERE / "current.yaml").commands)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME",
                        help=f"runs to compare, of {', '.join(names)} (default: all)")
    parser.add_argument("--base", metavar="COMMIT", help="commit to compare with (default: the one in BASE)")
    parser.add_argument("--keep", action="store_true", help="keep the run directories and logs, and print where")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="goldens-")).resolve()
    try:
        commit = find_commit(options.base or (HERE / "BASE").read_text().strip())
        equal = compare_all(options.only, commit, folder)
    except Impossible as error:
        print(f"goldens: {error}", file=sys.stderr)
        return 2
    finally:
        if options.keep:
            print(f"results are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{'equal to' if equal else 'NOT equal to'} {commit[:7]}, {time.monotonic() - began:.0f} s")
    return 0 if equal else 1


def leave(number: int, frame: object) -> None:
    """A signal ends the trainings and removes the worktree, too."""
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGHUP, leave)
    sys.exit(main())
