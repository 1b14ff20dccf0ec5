"""Verbs of a fleet: `join`, and what its processes are started with."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from qfleet.verbs.telling import complain, outcome


def join(args: Namespace) -> int:
    """Lend this host's cores to a fleet."""
    from qfleet.join import Join, knock
    from qfleet.members import Contact
    from qfleet.runtime.threads import usable_cores

    contact = Contact(args.words[0], "", args.token_file, args.patience, args.tls_ca, args.tls_cert, args.tls_key,
                      trust=args.trust)
    actors = args.actors or usable_cores()
    knock(contact)
    several = actors != 1
    complain(f"{actors} actor{'s' * several} for the fleet at {contact.address}; Ctrl-C stops "
             f"{'them' if several else 'it'}")
    reason = Join(contact, actors).run()
    ending = "the run is over" if reason is None else "left the fleet"
    complain(ending)
    outcome(args, [], {"fleet": contact.address, "actors": actors, "ending": ending})
    return 130 if reason == "interrupted" else 0


def member(args: Namespace) -> int:
    """Be one process of a fleet."""
    from qfleet.bundle import run_bundle, run_shard
    from qfleet.cellhost import run_cell
    from qfleet.crew import run_rank
    from qfleet.members import Contact, run_actor, run_evaluator
    from qfleet.runtime.supervise import VAIN
    from qfleet.types import BadOutput

    role, place, *name = args.words
    if role == "cell":
        return run_cell(Path(place))
    if role == "rank":
        return run_rank(Path(place))
    if role == "shard":
        return run_shard(Path(place), int(name[0].removeprefix("shard/")))
    tls = (args.tls_ca, args.tls_cert, args.tls_key)
    contact = Contact(place, name[0], args.token_file, args.patience, *tls, args.siblings, args.trust,
                      args.claim_file)
    try:
        if role == "evaluator":
            return run_evaluator(contact, None if args.videos is None else Path(args.videos))
        return run_bundle(contact) if role == "bundle" else run_actor(contact)
    except BadOutput as error:
        complain(f"environment failed: {error}")
        return VAIN
