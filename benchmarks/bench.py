"""Compares the speed of qfleet with other libraries at equal work, or profiles an update.

    python benchmarks/bench.py [WORKLOAD ...] [device=NAME] [--rounds 3] [--steps N] [--threads 1] [--peers NAME ...]
    python benchmarks/bench.py [WORKLOAD ...] --profile [key=value ...] [--steps N] [--threads 1]

WORKLOAD is one of cartpole, pong (the default), halfcheetah, halfcheetah-ddpg, acting, updates, updates-512. All
contenders do the same work, except that sb3 does less at `updates`. Rounds alternate, each in a fresh process. A peer
that is not installed or fails is named in the table. device=NAME applies to all contenders; other overrides need
--profile. bench.json and bench.png, or profile.json, are written to --out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from speed import describe_machine, tables
from speed.peers import ABSENT, PEERS
from speed.rounds import OURS, contenders, measure
from speed.workloads import DEFAULT, WORKLOADS, RoundSpec, Workload

from qfleet.cli.commands import report_error
from qfleet.cli.options import as_json, at_least
from qfleet.cli.output import clean_stdout, print_error, print_result
from qfleet.cli.parsing import OVERRIDE
from qfleet.core.errors import UserError

EXAMPLES = """examples:
  python benchmarks/bench.py
  python benchmarks/bench.py cartpole pong --rounds 5 --peers sb3 tianshou --out results
  python benchmarks/bench.py updates acting device=cuda --threads 16
  python benchmarks/bench.py pong --profile learner.precision=fp32"""
PROFILE_FILL_STEPS = 1_000


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Options, workloads (`args.workloads`) and overrides (`args.overrides`), in any order."""
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORKLOAD|key=value", help="workloads, and overrides")
    parser.add_argument("--rounds", type=at_least(1), metavar="N",
                        help="measurements of each contender, of which medians are shown (default: 3)")
    parser.add_argument("--steps", type=at_least(1), metavar="N",
                        help="environment steps, or updates, of a round (default: seconds to half a minute each)")
    parser.add_argument("--threads", type=at_least(1), default=1, metavar="N",
                        help="threads for the network, and for emulators (default: 1)")
    parser.add_argument("--peers", nargs="*", metavar="NAME",
                        help="sb3, tianshou, or module:function; without a name only qfleet is measured (default: sb3 "
                             "tianshou)")
    parser.add_argument("--quick", action="store_true", help="one round, as short as can be measured")
    parser.add_argument("--timeout", type=at_least(1), default=900, metavar="S",
                        help="seconds after which a measurement is stopped (default: 900)")
    parser.add_argument("--profile", action="store_true",
                        help="time of an update by section, compared with the peak rates of this machine")
    parser.add_argument("--out", metavar="DIR", default="bench",
                        help="folder for bench.json and bench.png, or profile.json (default: bench)")
    as_json(parser)
    args = parser.parse_intermixed_args(argv)
    args.workloads, args.overrides = split_words(args.words)
    return args


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Names of workloads, and key=value overrides."""
    return ([word for word in words if not OVERRIDE.match(word)], [word for word in words if OVERRIDE.match(word)])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the results; the exit code is 1 if a measurement of qfleet failed, 2 for a wrong argument."""
    args = parse(argv)
    try:
        works = find_workloads(args.workloads)
        device, overrides = find_device(args.overrides, args.profile)
        return profile_updates(args, works, device, overrides) if args.profile else compare(args, works, device)
    except KeyboardInterrupt:
        print_error("interrupted")
        return 130
    except Exception as error:
        return report_error(error)


def compare(args: argparse.Namespace, works: Sequence[Workload], device: str) -> int:
    """Measure qfleet and its peers at these workloads."""
    for work in works:
        if args.steps is not None and args.steps < work.least:
            raise UserError(f"--steps {args.steps}: {work.name} needs at least {work.least}, since the first "
                            f"{work.warm_up} are warm-up")
    peers = list(PEERS) if args.peers is None else list(dict.fromkeys(args.peers))
    by_work = {work.name: contenders(work, peers, device) for work in works}
    out = make_folder(args.out)
    rounds = args.rounds or (1 if args.quick else 3)
    steps = {work.name: args.steps or (work.least if args.quick else work.steps) for work in works}
    machine = describe_machine()
    settings = {"rounds": rounds, "threads": args.threads, "device": device, "load": machine["load"][0], "steps": steps,
                "absent": ABSENT if args.peers is None and any(work.algo for work in works) else {}}
    everyone = [contender for found in by_work.values() for contender in found]

    def document() -> dict[str, Any]:
        return {"machine": machine | {"load_after": [round(value, 2) for value in os.getloadavg()]}, **settings,
                "ratio": {name: tables.ratios(found) for name, found in by_work.items()},
                "results": [contender.to_json() for contender in everyone]}

    def report(line: str) -> None:
        print_error(line)
        write(out / "bench.json", document())  # after every round, so that an interruption loses nothing

    for work in works:
        measure(by_work[work.name], RoundSpec(steps[work.name], 0, args.threads, device), rounds, args.timeout, report)
    plot = tables.draw(everyone, out / "bench.png")
    lines = [*tables.render(everyone, settings), write(out / "bench.json", document())]
    lines.append(str(plot) if plot else "no plot: pip install 'qfleet[plot]'")
    print_result(args, lines, document())
    return 1 if any(contender.problem for contender in everyone if contender.who == OURS) else 0


def profile_updates(args: argparse.Namespace, works: Sequence[Workload], device: str, overrides: Sequence[str]) -> int:
    """Profile updates of these workloads' recipes."""
    from speed.update_profile import lines, profile

    out = make_folder(args.out)
    found, text = {}, []
    for recipe in dict.fromkeys(work.recipe for work in works):
        updates = args.steps or (30 if args.quick else 200)
        print_error(f"{recipe}: {updates} updates")
        with clean_stdout(args):
            found[recipe] = profile(recipe, [f"device={device}", f"run.threads={args.threads}", *overrides], updates,
                                    PROFILE_FILL_STEPS)
        text += [*lines(found[recipe]), ""]
    document = {"machine": describe_machine(), "profile": {name: its.to_json() for name, its in found.items()}}
    print_result(args, [*text, write(out / "profile.json", document)], document)
    return 0


def find_workloads(names: Sequence[str]) -> list[Workload]:
    """The workloads of these names; without names, those of the default set that can run here."""
    problems, found = [], []
    for name in dict.fromkeys(names or DEFAULT):
        if name not in WORKLOADS:
            near = get_close_matches(name, WORKLOADS, 1)
            problems.append(f"{name!r} is not a workload: " + (f"did you mean {near[0]}?" if near else
                                                               f"choose from {', '.join(WORKLOADS)}"))
        elif WORKLOADS[name].module and not find_spec(WORKLOADS[name].module):
            text = f"{name} is not installed: pip install 'qfleet[{WORKLOADS[name].extra}]'"
            problems.append(text) if names else print_error(text)
        else:
            found.append(WORKLOADS[name])
    if problems:
        raise UserError("\n".join(problems))
    return found


def find_device(words: Sequence[str], profile: bool) -> tuple[str, list[str]]:
    """The device that `device=NAME` names, cpu by default, and the other overrides, which only a profile may have."""
    named = [word for word in words if word.startswith("device=")]
    others = [word for word in words if word not in named]
    if others and not profile:
        raise UserError(f"{others[0]} would make qfleet's work differ from the peers': the only override for all is "
                        "device=NAME, others need --profile")
    if not named:
        return "cpu", others
    from qfleet.runconfig.auto import resolve_device
    from qfleet.runconfig.resolution import resolve

    return str(resolve_device(resolve("cartpole", named).config.device)), others


def make_folder(name: str) -> Path:
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {name}: {error.strerror}; give a folder that can be written") from None
    return path


def write(path: Path, document: Mapping[str, Any]) -> str:
    """Write a JSON file atomically; returns its path."""
    from qfleet.report.webpage import nan_to_null
    from qfleet.runs.atomic_file import atomic_file

    with atomic_file(path) as partial:
        partial.write_text(json.dumps(nan_to_null(document), indent=2) + "\n")
    return str(path)


if __name__ == "__main__":
    sys.exit(main())
