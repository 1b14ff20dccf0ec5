"""The verb that measures speed: `bench`, beside other libraries, and `bench --profile`, part by part."""

from __future__ import annotations

import json
import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qfleet.verbs.telling import clean_stdout, complain, outcome, say

if TYPE_CHECKING:
    from qfleet.bench.work import Work


def bench(args: Namespace) -> int:
    """Measure, tell, and write it down; 1 if something of ours failed."""
    from qfleet.bench.work import WORKS

    works = _works(args.words, WORKS)
    device = _device(args)
    if args.profile:
        return _profile(args, works, device)
    return _side_by_side(args, works, device)


def bench_round(args: Namespace) -> int:
    """Be the process of one round: figures on the last line of stdout, or what went wrong on the last of stderr."""
    import traceback
    from dataclasses import asdict

    from qfleet.bench.rounds import take_part

    try:
        found = take_part(args.words[0])
    except Exception:
        traceback.print_exc()
        return 1
    say(json.dumps(asdict(found)))
    return 0


def _side_by_side(args: Namespace, works: Sequence[Work], device: str) -> int:
    from qfleet.bench import machine, tables
    from qfleet.bench.peers import ABSENT, PEERS
    from qfleet.bench.rounds import OURS, entries, measure
    from qfleet.bench.work import Job
    from qfleet.types import UserError

    for work in works:
        if args.steps is not None and args.steps < work.least:
            raise UserError(f"--steps {args.steps}: {work.name} needs at least {work.least}, since the first "
                            f"{work.warm_up} are warm-up")
    peers = list(PEERS) if args.peers is None else list(dict.fromkeys(args.peers))
    everyone = {work.name: entries(work, peers, device) for work in works}
    out = _folder(args.out)
    rounds = args.rounds or (1 if args.quick else 3)
    steps = {work.name: args.steps or (work.least if args.quick else work.steps) for work in works}
    found = machine(_command())
    settings = {"rounds": rounds, "threads": args.threads, "device": device, "load": found["load"][0], "steps": steps,
                "absent": ABSENT if args.peers is None and any(work.algo for work in works) else {}}
    flat = [entry for its in everyone.values() for entry in its]

    def document() -> dict[str, Any]:
        return {"machine": found | {"load_after": [round(value, 2) for value in os.getloadavg()]}, **settings,
                "ratio": {name: tables.ratios(its) for name, its in everyone.items()},
                "results": [entry.to_json() for entry in flat]}

    def told(line: str) -> None:
        complain(line)
        _write(out / "bench.json", document())  # what is measured is not lost to an interruption

    for work in works:
        measure(everyone[work.name], Job(steps[work.name], 0, args.threads, device), rounds, args.timeout, told)
    picture = tables.draw(flat, out / "bench.png")
    lines = [*tables.render(flat, settings), _write(out / "bench.json", document())]
    lines.append(str(picture) if picture else "no picture: pip install 'qfleet[plot]'")
    outcome(args, lines, document())
    return 1 if any(entry.problem for entry in flat if entry.who == OURS) else 0


def _profile(args: Namespace, works: Sequence[Work], device: str) -> int:
    from qfleet.bench import machine
    from qfleet.bench.profile import lines, profile

    out = _folder(args.out)
    found, told = {}, []
    for recipe in dict.fromkeys(work.recipe for work in works):
        words = [f"device={device}", f"run.threads={args.threads}", *args.overrides]
        updates, fill = args.steps or (30 if args.quick else 200), 1_000
        complain(f"{recipe}: {updates} updates")
        with clean_stdout(args):
            found[recipe] = profile(recipe, words, updates, fill)
        told += [*lines(found[recipe]), ""]
    document = {"machine": machine(_command()), "profile": {name: its.to_json() for name, its in found.items()}}
    outcome(args, [*told, _write(out / "profile.json", document)], document)
    return 0


def _works(names: Sequence[str], known: dict[str, Work]) -> list[Work]:
    """The workloads of these names; without names those of the default set that can run here."""
    from difflib import get_close_matches

    from qfleet.bench.work import DEFAULT
    from qfleet.types import UserError

    problems, found = [], []
    for name in dict.fromkeys(names or DEFAULT):
        if name not in known:
            near = get_close_matches(name, known, 1)
            problems.append(f"{name!r} is no workload: " + (f"did you mean {near[0]}?" if near else
                                                            f"choose from {', '.join(known)}"))
        elif known[name].module and not find_spec(known[name].module):
            text = f"{name} is not installed: pip install 'qfleet[{known[name].extra}]'"
            problems.append(text) if names else complain(text)
        else:
            found.append(known[name])
    if problems:
        raise UserError("\n".join(problems))
    return found


def _device(args: Namespace) -> str:
    """What `device=` says; it is taken out of the overrides, and others are refused where peers could not follow."""
    from qfleet.types import UserError

    named = [word for word in args.overrides if word.startswith("device=")]
    args.overrides = [word for word in args.overrides if word not in named]
    if args.overrides and not args.profile:
        raise UserError(f"{args.overrides[0]} would make the work of ours another than the peers': of overrides only "
                        "device=NAME is for everybody, others are for --profile")
    if not named:
        return "cpu"
    from qfleet.assemble import device_of
    from qfleet.recipe import resolve

    return str(device_of(resolve("cartpole", named).config.device))


def _folder(name: str) -> Path:
    from qfleet.types import UserError

    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {name}: {error.strerror}; give a folder that can be written") from None
    return path


def _write(path: Path, document: dict[str, Any]) -> str:
    from qfleet.runs.appear import appearing
    from qfleet.runs.webpage import finite

    with appearing(path) as partial:
        partial.write_text(json.dumps(finite(document), indent=2) + "\n")
    return str(path)


def _command() -> str:
    return shlex.join(["qfleet", *sys.argv[1:]])
