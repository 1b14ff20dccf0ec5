"""Actors that join a run with several learners: each is sent to its learner, whose port is known by its position."""

import json
import platform

import grpc
import pytest
import torch

import qfleet
from qfleet.core.errors import UserError
from qfleet.launch.driver import require_startable
from qfleet.launch.run_request import RunRequest, learner_endpoint
from qfleet.launch.serving import JoinedActorPorts
from qfleet.runconfig.resolution import resolve
from qfleet.runs.membership import write_members, write_members_of
from qfleet.transport.fleet_config import FleetConfig
from qfleet.transport.fleet_pb2 import HelloRequest, Welcome
from qfleet.transport.fleet_server import CallRejected, FleetService
from qfleet.transport.grpc_channel import PROTOCOL
from qfleet.transport.inbox import Inbox
from qfleet.transport.published_state import PublishedState
from qfleet.transport.registry import Registry
from qfleet.transport.security import claimed_name

CLAIM = "c" * 64
NAMES = [claimed_name("host", CLAIM, index) for index in range(5)]


def config(*overrides):
    return resolve("cartpole", ["agent.hidden=[8]", "env.lanes=2", "replay.min_steps=64", "learner.batch_size=8",
                                "learners=2", "actors=2", "fleet.listen=127.0.0.1:0", *overrides]).config


def ports(folder, *overrides, learners=(1,)):
    RunRequest(str(folder), {}, {}).write(folder)
    for index in learners:
        learner_endpoint(folder, index).write_text(json.dumps({"port": 5000 + index}))
    return JoinedActorPorts(folder, config(*overrides))


def test_joining_actors_alternate_between_learners_and_find_theirs_again(tmp_path):
    port_of = ports(tmp_path, "sync=allreduce")
    assert [port_of(name) for name in NAMES] == [0, 5001, 0, 5001, 0]
    assert [port_of(name) for name in reversed(NAMES)] == [0, 5001, 0, 5001, 0]
    assert port_of("another/0") == 5001, "whichever host it comes from"


def test_the_coordinator_of_a_parameter_server_sends_all_away(tmp_path):
    port_of = ports(tmp_path, "sync=server", learners=(0, 1))
    assert [port_of(name) for name in NAMES] == [5000, 5001, 5000, 5001, 5000]


def test_one_learner_keeps_all(tmp_path):
    port_of = ports(tmp_path, "learners=1", learners=())
    assert {port_of(name) for name in NAMES} == {0}


def test_names_beyond_the_limit_of_members_are_forgotten_from_the_oldest_on(tmp_path):
    port_of = ports(tmp_path, "sync=allreduce", "fleet.max_members=3")
    assert [port_of(name) for name in NAMES[:3]] == [0, 5001, 0]
    port_of(NAMES[3])
    assert list(port_of._sent) == NAMES[1:4]


def member(name, silent_s=0.0, role="actor"):
    return {"name": name, "role": role, "silent_s": silent_s, "live_s": 30.0}


def test_actors_that_have_left_do_not_count_and_those_that_are_listed_find_their_learner(tmp_path):
    port_of = ports(tmp_path, "sync=allreduce")
    write_members(tmp_path, [member("actor/0"), member("gone/0", 60.0), member("gone/1", 60.0),
                             member("evaluator", role="evaluator")])
    write_members_of(tmp_path, 1, [member("actor/1"), member(NAMES[0])])
    assert port_of(NAMES[0]) == 5001, "learner 1 lists it"
    assert port_of(NAMES[1]) == 0, "learner 0 has one actor left, learner 1 two"


def test_a_process_that_registers_again_stays_with_its_learner(tmp_path):
    service_0 = service(ports(tmp_path, "sync=allreduce"))
    hello(service_0, NAMES[0], own=False)
    assert hello(service_0, NAMES[1], own=False).redirect_port == 5001
    assert not hello(service_0, NAMES[1], own=False, again=True).redirect_port


def hello(service, name, own, again=False):
    request = HelloRequest(protocol=PROTOCOL, version=qfleet.__version__, torch=torch.__version__, claim=CLAIM,
                           python=platform.python_version(), name=name, role="actor", host="h", pid=1,
                           session="a" * 32, again=again)
    return Welcome.FromString(service.hello(request, own))


def service(redirect):
    return FleetService(PublishedState("", "{}", 2), Registry(2, 30.0, share=0, shares=2), Inbox(4), 1 << 20, redirect)


def test_a_joining_actor_is_redirected_and_not_registered(tmp_path):
    service_0 = service(ports(tmp_path, "sync=allreduce"))
    assert (hello(service_0, NAMES[0], own=False).redirect_port, service_0.registry.members()[0].name) == (0, NAMES[0])
    assert hello(service_0, NAMES[1], own=False).redirect_port == 5001
    assert len(service_0.registry.members()) == 1


def test_an_actor_of_the_run_itself_is_not_redirected(tmp_path):
    coordinator = service(ports(tmp_path, "sync=server", learners=(0, 1)))
    assert not hello(coordinator, "actor/1", own=True).redirect_port
    assert [member.name for member in coordinator.registry.members()] == ["actor/1"]


def test_a_joining_actor_waits_until_its_learner_has_started(tmp_path):
    service_0 = service(ports(tmp_path, "sync=allreduce", learners=()))
    hello(service_0, NAMES[0], own=False)
    with pytest.raises(CallRejected, match="is starting") as refused:
        hello(service_0, NAMES[1], own=False)
    assert refused.value.code == grpc.StatusCode.UNAVAILABLE, "so that it tries again"


def test_the_port_of_a_learner_is_its_position_above_the_main_one():
    fleet = FleetConfig(listen="127.0.0.1:4440")
    assert [fleet.with_offset(index).listen for index in range(3)] == [f"127.0.0.1:444{index}" for index in range(3)]
    assert FleetConfig(listen="127.0.0.1:0").with_offset(1).listen == "127.0.0.1:0", "any free one"
    assert FleetConfig().with_offset(1).listen is None


@pytest.mark.parametrize("sync,services", [("allreduce", 2), ("server", 3)])
def test_the_ports_of_all_learners_must_be_free(monkeypatch, sync, services):
    asked = []
    monkeypatch.setattr("qfleet.launch.driver.require_free", lambda address: asked.append(address.port))
    require_startable(config(f"sync={sync}", "fleet.listen=127.0.0.1:4440"))
    assert asked == [4440 + offset for offset in range(services)]


def test_ports_beyond_the_last_one_are_refused():
    with pytest.raises(UserError, match=r"fleet.listen=127.0.0.1:65535 with learners=2: .* up to 65536"):
        config("sync=allreduce", "fleet.listen=127.0.0.1:65535")
