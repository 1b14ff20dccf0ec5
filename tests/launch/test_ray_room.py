"""How many actors a cluster has room for: what is free is counted node by node. And whether there is a cluster."""

import socket
import sys
from types import SimpleNamespace

import pytest

from qfleet.core.errors import UserError
from qfleet.launch import ray_session
from qfleet.launch.ray_session import RaySession
from qfleet.transport.ray_config import RayConfig

LEARNER, EVALUATOR = {"CPU": 1.0, "GPU": 1.0}, {"CPU": 1.0}


def node(name, alive=True, **resources):
    return {"NodeID": name, "Alive": alive, "Resources": resources}


@pytest.mark.parametrize(("nodes", "needs", "room"), [
    ([node("a", CPU=3.0, GPU=1.0), node("b", CPU=1.0)], {"CPU": 1.0}, 2),
    ([node("a", CPU=3.0, GPU=1.0), node("b", CPU=2.0)], {"CPU": 1.5}, 1),  # 3 CPUs are free, but nowhere 1.5 twice
    ([node("a", CPU=3.0, GPU=1.0), node("b", CPU=8.0, alive=False)], {"CPU": 1.0}, 1),
    ([node("a", CPU=8.0, GPU=1.0), node("b", CPU=8.0, far=0.3)], {"CPU": 1.0, "far": 0.1}, 3),
    ([node("a", CPU=8.0, GPU=1.0), node("b", CPU=8.0, GPU=2.0)], {"CPU": 1.0, "GPU": 1.0}, 2),  # the learner's
    ([node("a", CPU=1.0, GPU=1.0)], {"CPU": 1.0}, 0),  # less than they were given: a node came back smaller
])
def test_room(monkeypatch, nodes, needs, room):
    table = {"bundles_to_node_id": {0: "a", 1: "a"}}
    util = SimpleNamespace(placement_group_table=lambda group: table)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(nodes=lambda: nodes, util=util))
    monkeypatch.setitem(sys.modules, "ray.util", util)
    assert RaySession.room(None, needs, "group", [LEARNER, EVALUATOR]) == room


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://localhost:{}"])
def test_where_nothing_listens_ray_is_not_even_asked(monkeypatch, tmp_path, form):
    asked = []
    fake = SimpleNamespace(init=lambda **how: asked.append(how["address"]), is_initialized=lambda: False,
                           exceptions=SimpleNamespace(RayError=RuntimeError),
                           util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"))
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(ray_session, "require_ray", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = form.format(server.getsockname()[1])
        RaySession(RayConfig(address=address), tmp_path, 1.0)
    assert asked == [address]
    with pytest.raises(UserError, match=rf"no Ray at {address}: Connection refused; is it running"):
        RaySession(RayConfig(address=address), tmp_path, 1.0)
    assert asked == [address]
