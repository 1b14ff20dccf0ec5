"""Actors that join a run with several learners: they are divided between the learners, each at its own port."""

import socket
from contextlib import ExitStack, closing

import pytest
from fleet_runs import PATHS, stored
from hosts_kit import SMALL, Watch, Yard, certificate
from real_runs import newest, records

from qfleet.runs.membership import read_members

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
HERE = {"PYTHONPATH": PATHS}
LEDGER = ["fleet_envs:Ledger", *SMALL, "learners=2", "actors=2", "replay.capacity=100000", "total_steps=2000",
          "env.kwargs={gate: gate}", "run.name=x", "run.log_period_steps=100", "device=cpu"]


@pytest.fixture
def yard(tmp_path):
    with closing(Yard(tmp_path)) as made:
        yield made


def free_ports(number, first=20400):
    """The first of so many free ports in a row."""
    for port in range(first, 32000, number):
        with ExitStack() as stack:
            try:
                for offset in range(number):
                    stack.enter_context(socket.create_server(("127.0.0.1", port + offset)))
            except OSError:
                continue
            return port
    raise AssertionError("no free ports")


def joined(watch):
    pulse = watch.pulse()
    return sorted(member.name for member in pulse.members if "/" in member.name and not own(member.name)) \
        if pulse else []


def own(name):
    return name.startswith(("actor/", "learner/"))


def assert_all_stored_once(run):
    seen, _ = stored(run)
    assert all(sorted(times) == list(range(len(times))) for times in seen.values()), "none missing, none twice"
    return len(seen)


def test_joined_actors_are_divided_between_averaging_learners_over_tls(yard):
    cert, key = certificate(yard.folder, "fleet")
    port, run = free_ports(2), yard.folder / "runs" / "x"
    places = [f"127.0.0.1:{port + offset}" for offset in range(2)]
    head = yard.run("train", *LEDGER, "sync=allreduce", f"fleet.listen={places[0]}", f"fleet.token_file={yard.token}",
                    f"fleet.tls_cert={cert}", f"fleet.tls_key={key}", **HERE)
    actors = yard.join(places[0], "--tls-ca", str(cert), "--actors", "2", **HERE)
    with Watch(places[0], yard.token, cert) as main, Watch(places[1], yard.token, cert) as second:
        head.until(lambda: len(joined(main)) == 1 and len(joined(second)) == 1)
        names = joined(main) + joined(second)
        assert len({name.rpartition("/")[0] for name in names}) == 1 and len(set(names)) == 2, "both of one host"
        indices = [member.index for watch in (main, second) for member in watch.pulse().members if member.index >= 0]
        assert len(set(indices)) == len(indices), "each explores with its own parameters"
        head.until(lambda: {member["name"] for member in read_members(run).get("members", [])} >= {
            "actor/0", "actor/1", *names})
    (yard.folder / "gate").touch()
    head.ends(0)
    assert "the run has ended" in actors.ends(0, 30)
    assert max(record.get("fleet/actors", 0) for record in records(run)) == 4
    assert assert_all_stored_once(run) == 8


def test_a_parameter_server_can_have_joined_actors_only_and_ends_them(yard):
    port = free_ports(3)
    head = yard.run("train", *LEDGER, "sync=server", "parameter_server.shards=1", f"fleet.listen=127.0.0.1:{port}",
                    f"fleet.token_file={yard.token}", "--no-local-actors", **HERE)
    hosts = [yard.join(f"127.0.0.1:{port}", **HERE) for _ in range(2)]
    with Watch(f"127.0.0.1:{port + 1}", yard.token) as first, Watch(f"127.0.0.1:{port + 2}", yard.token) as second:
        head.until(lambda: len(joined(first)) == 1 and len(joined(second)) == 1)
    (yard.folder / "gate").touch()
    head.ends(0)
    for host in hosts:
        assert "the run has ended" in host.ends(0, 30)
    run = yard.folder / "runs" / "x"
    state = newest(run).state()
    parts = [state, *state["ranks"]]
    assert sum(part["clock"]["steps"] for part in parts) == state["steps"] == newest(run).manifest.step
    assert min(part["clock"]["steps"] for part in parts) > 0 and assert_all_stored_once(run) == 4
