"""Commands of a fleet: `join`, and `_member`, which runs one of its processes."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from qfleet.cli.output import print_error, print_result


def join(args: Namespace) -> int:
    """Run actors on this host for a fleet."""
    from qfleet.accel.threads import usable_cores
    from qfleet.launch.endpoint import GrpcEndpoint
    from qfleet.launch.join import JoinedActors, probe

    contact = GrpcEndpoint(args.words[0], "", args.token_file, args.patience, args.tls_ca, args.tls_cert, args.tls_key,
                           trust=args.trust)
    actors = args.actors or usable_cores()
    probe(contact)
    several = actors != 1
    print_error(f"{actors} actor{'s' * several} for the fleet at {contact.address}; Ctrl-C stops "
                f"{'them' if several else 'it'}")
    reason = JoinedActors(contact, actors).run()
    ending = "the run has ended" if reason is None else "left the fleet"
    print_error(ending)
    print_result(args, [], {"fleet": contact.address, "actors": actors, "ending": ending})
    return 130 if reason == "interrupted" else 0


def run_member(args: Namespace) -> int:
    """Run one process of a fleet."""
    from qfleet.core.errors import BadOutput
    from qfleet.launch.coordinator_node import run_coordinator
    from qfleet.launch.learner_node import run_learner
    from qfleet.launch.rank_node import run_rank
    from qfleet.launch.shard_node import run_shard
    from qfleet.process.supervisor import EXIT_UNRECOVERABLE

    role, place, *name = args.words
    if role in ("learner", "coordinator"):
        return (run_learner if role == "learner" else run_coordinator)(Path(place))
    if role == "shard":
        return run_shard(Path(place), int(name[0].removeprefix("shard/")))
    try:
        if role == "rank":
            return run_rank(Path(place), name[0], int(name[1]))
        return _run_client(args, role, place, name[0])
    except BadOutput as error:
        print_error(f"environment failed: {error}")
        return EXIT_UNRECOVERABLE


def _run_client(args: Namespace, role: str, place: str, name: str) -> int:
    """Run a process that connects to a learner or coordinator at the address `place`."""
    from qfleet.launch.actor_node import run_actor
    from qfleet.launch.endpoint import GrpcEndpoint
    from qfleet.launch.evaluator_node import run_evaluator
    from qfleet.launch.worker_node import run_worker

    tls = (args.tls_ca, args.tls_cert, args.tls_key)
    contact = GrpcEndpoint(place, name, args.token_file, args.patience, *tls, args.siblings, args.trust,
                           args.claim_file)
    if role == "evaluator":
        return run_evaluator(contact, None if args.videos is None else Path(args.videos))
    return run_worker(contact) if role == "worker" else run_actor(contact)
