"""Bottleneck of a run, found from its metric records.

The rate limiter couples acting and learning, so one side waits for the other; the side that never waits is the limit:

    the learner idles          the actors are too slow: the largest part of their step is the limit
    the actors are held back   the learner is too slow: updates or, if drawing samples takes longer, decoding
    both wait alternately      the rate limiter ("pace"): each side could continue, but is not allowed to yet
    actors wait, not held      their messages arrive slowly or are received slowly: the wire

With all roles in one process there is no waiting: the largest part of the time is the limit. The same holds for the
learners of a parameter server, where communication with the server is a separate part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Record = Mapping[str, Any]

RECENT_RECORDS = 10
BOTH_WAIT = 0.2
"""If both sides wait for at least this fraction of their time, neither of them is the limit."""

MIN_HELD = 0.02
"""Smaller fractions are noise."""

ACTING = {"env": "actor/env_ms", "inference": "actor/act_ms", "wire": "actor/store_ms", "waiting": "actor/wait_ms"}
ACTING_HERE = {"storing" if name == "wire" else name: tag for name, tag in ACTING.items()}
"""The same for a run in one process, which sends nothing."""

LEARNING = {"decode": "train/sample_ms", "learner": "train/update_ms"}
LIMIT_NAMES = {"env": "the environment", "inference": "choosing actions", "wire": "storing and sending",
               "storing": "storing", "waiting": "waiting", "decode": "drawing samples", "learner": "updates",
               "evaluation": "evaluations",
               "server": "communication with the parameter server",
               "checkpoints": "checkpoints"}

SPEEDUPS = ("a GPU (device=cuda)", "learner.precision=bf16", "learner.capture=true")
"""Options that make an update faster."""

FEWER = "a larger learner.batch_size means fewer updates, a lower replay.samples_per_insert fewer samples per step"
ADVICE = {
    "env": "raise actors, or add actors on other hosts (fleet.listen); more env.threads help if the environment uses "
           "them",
    "inference": "raise env.lanes, so that one network call serves more environments, or raise actors; a smaller "
                 "network (agent.hidden, agent.torso) is faster",
    "wire": "raise replay.chunk_steps for fewer and larger messages, and learner.publish_period_updates to send "
            "weights less often; actors on this host need no network",
    "decode": "lower replay.samples_per_insert or agent.n_step, so that fewer rows are decoded",
    "learner": FEWER,
    "pace": "raise replay.chunk_steps or env.lanes, which allows a larger distance between the two sides; "
            "replay.samples_per_insert sets their ratio",
    "evaluation": "set eval.process=true to evaluate in a separate process during training; or raise "
                  "eval.period_steps, or lower eval.episodes",
    "checkpoints": "raise checkpoint.period_steps, or set checkpoint.replay=false",
}
INLINE_ADVICE = {
    "env": "raise actors, so that environments run in processes of their own, in parallel to learning; more "
           "env.threads help if the environment uses them",
    "inference": "raise env.lanes, so that one network call serves more environments; a smaller network "
                 "(agent.hidden, agent.torso) is faster",
    "storing": "raise replay.chunk_steps, so that fewer rows are stored twice, or set actors=1 to store in "
               "parallel to learning",
}
SERVER_ADVICE = {
    "server": "raise parameter_server.push_period_updates and parameter_server.pull_period_updates for fewer messages, "
              "or learner.batch_size for fewer updates; parameter_server.compress=bf16 makes messages of a large "
              "network smaller",
    "env": "raise env.groups, so that environments step while the network selects actions; more learners help if there "
           "are cores for them",
}
SILENT = "check logs/ of the run, or add actors (qfleet join)"
WARMING_UP = "lower replay.min_steps to start earlier; raise actors or env.lanes to fill it faster"


@dataclass(frozen=True)
class Bottleneck:
    """Bottleneck of a run, with evidence and advice as text.

    `limit` is env, inference, wire (storing in one process), decode, learner, server, pace, evaluation or checkpoints.
    """

    limit: str
    evidence: str
    advice: str


def unused_speedups(device: object, precision: object, captured: bool, gpu: bool = True) -> tuple[str, ...]:
    """Return the `SPEEDUPS` that a run does not use. `gpu` is False if its machine is known to have none."""
    on_gpu = str(device).startswith("cuda")
    used = (on_gpu or not gpu, precision == "bf16", captured or not on_gpu)
    return tuple(option for option, is_used in zip(SPEEDUPS, used, strict=True) if not is_used)


def find_bottleneck(records: Iterable[Record], faster: Sequence[str] = SPEEDUPS) -> Bottleneck | None:
    """Find the bottleneck from the latest records; None if they contain no timings. `faster` are unused speedups."""
    found = _classify(list(records))
    if found is None or found.limit != "learner" or not faster:
        return found
    *others, last = faster
    words = f"{', '.join(others)} or {last}" if others else last
    return replace(found, advice=f"{words} may make an update faster; {found.advice}")


def _classify(recent: list[Record]) -> Bottleneck | None:
    mean = recent_means(recent)
    acting = acting_shares(mean)
    if not acting:
        return None
    fleet = "fleet/actors" in mean
    if fleet and recent[-1].get("fleet/actors") == 0:
        return Bottleneck("wire", "no actor has sent a heartbeat recently", SILENT)
    learning = time_shares(mean, LEARNING)
    if not learning:
        return Bottleneck("pace", "learning has not started: the replay is filling up to replay.min_steps", WARMING_UP)
    return _of_fleet(mean, acting, learning) if fleet else _of_one_process(mean, acting, learning)


def recent_means(records: Iterable[Record]) -> dict[str, float]:
    """Mean of every metric over the latest records."""
    return _means(_steady(list(records)[-RECENT_RECORDS:]))


def time_shares(metrics: Record, tags: Mapping[str, str]) -> dict[str, float]:
    """Fractions of the total of some timings, 0 to 1 by name; empty if there are none."""
    spent = {name: float(metrics[tag]) for name, tag in tags.items() if metrics.get(tag) is not None}
    total = sum(spent.values())
    return {name: value / total for name, value in spent.items()} if total > 0 else {}


def acting_shares(metrics: Record) -> dict[str, float]:
    """Fractions of an actor's time, 0 to 1 by name."""
    return time_shares(metrics, ACTING if "fleet/actors" in metrics else ACTING_HERE)


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _steady(records: list[Record]) -> list[Record]:
    """Drop exceptional records: the first updates, slow while code is compiled, and the shutdown of a fleet."""
    begun = [place for place, record in enumerate(records) if record.get(LEARNING["learner"]) is not None]
    if len(begun) > 2:
        records = records[begun[0]:]  # _means gives the first record almost no weight
    while len(records) > 1 and "fleet/actors" in records[-1] and records[-1].get("step") == records[-2].get("step"):
        records = records[:-1]
    return records


def _means(records: list[Record]) -> dict[str, float]:
    """Mean of every metric, each record weighted by the time it spans."""
    sums: dict[str, tuple[float, float]] = {}
    before = 0.0 if len(records) == 1 else None
    for record in records:
        now = float(record.get("time_s") or 0.0)
        weight = max(1e-3, now - before) if before is not None else 1e-3  # the start of the first one is unknown
        before = now
        for tag, value in record.items():
            if isinstance(value, int | float):
                total, count = sums.get(tag, (0.0, 0.0))
                sums[tag] = (total + weight * value, count + weight)
    return {tag: total / weight for tag, (total, weight) in sums.items()}


def _of_fleet(mean: Record, acting: Mapping[str, float], learning: Mapping[str, float]) -> Bottleneck:
    wait, idle = acting.get("waiting", 0.0), _share(mean, "time/idle_share")
    held = _share(mean, "fleet/backpressure_share")
    waiting = f"actors wait {percent(wait)} of their time"
    busy = _learner_process_shares(mean, learning)
    if min(held, wait, idle) >= BOTH_WAIT:
        return Bottleneck(
            "pace", f"{waiting}, and the learner idles {percent(idle)}: they wait for each other alternately",
            ADVICE["pace"])
    if held >= max(idle, wait / 2, MIN_HELD):
        limit, part = _largest({name: share for name, share in busy.items() if name in LEARNING})
        return Bottleneck(
            limit,
            f"actors are held back {percent(held)} of the time; the learner spends {percent(part)} "
            f"on {LIMIT_NAMES[limit]}",
            ADVICE[limit],
        )
    if wait >= max(idle / 2, BOTH_WAIT):
        limit, part = _largest(busy)
        if limit == "wire" or idle >= part:
            return Bottleneck(
                "wire",
                f"{waiting} for messages to be received, although the learner is ready for more: it "
                f"idles {percent(idle)} and receives messages {percent(busy['wire'])} of the time",
                ADVICE["wire"],
            )
        return Bottleneck(
            limit, f"{waiting} while the learner's process spends {percent(part)} on {LIMIT_NAMES[limit]}",
            ADVICE[limit])
    limit, part = _largest({name: share for name, share in acting.items() if name != "waiting"})
    return Bottleneck(
        limit,
        f"the learner idles {percent(idle)} of its time; {LIMIT_NAMES[limit]} takes {percent(part)} of an actor's",
        ADVICE[limit])


def _learner_process_shares(mean: Record, learning: Mapping[str, float]) -> dict[str, float]:
    """Fractions of time of the learner's process, by the name of the limit."""
    updating = _share(mean, "time/learner_share")
    return {"wire": _share(mean, "time/inbox_share"), "checkpoints": _share(mean, "time/save_share"),
            **{name: share * updating for name, share in learning.items()}}


def _of_one_process(mean: Record, acting: Mapping[str, float], learning: Mapping[str, float]) -> Bottleneck:
    stepping, updating = _share(mean, "time/actor_share"), _share(mean, "time/learner_share")
    parts = {"evaluation": _share(mean, "time/eval_share"), "checkpoints": _share(mean, "time/save_share"),
             **{name: share * stepping for name, share in acting.items() if name != "waiting"},
             **{name: share * updating for name, share in learning.items()}}
    advice = {**ADVICE, **INLINE_ADVICE}
    if "server/push_pull_ms" in mean:
        fraction = min(1.0, _share(mean, "server/push_pull_ms") / max(1e-9, _share(mean, "train/update_ms")))
        update = parts.get("learner", 0.0)
        parts |= {"server": fraction * update, "learner": (1 - fraction) * update}
        advice |= SERVER_ADVICE
    limit, part = _largest(parts)
    takes = "take" if limit in ("learner", "evaluation", "checkpoints") else "takes"
    return Bottleneck(limit, f"{LIMIT_NAMES[limit]} {takes} {percent(part)} of the time", advice[limit])


def _share(mean: Record, tag: str) -> float:
    return float(mean.get(tag, 0.0))


def _largest(parts: Mapping[str, float]) -> tuple[str, float]:
    name = max(parts, key=lambda each: parts[each])
    return name, parts[name]
