"""Members that joined and lie, and processes that hold a port: what they say is not believed, and harms no other."""

from __future__ import annotations

import grpc
import pytest
from transport_kit import JOIN_TOKEN, TOKEN, eventually, fake_learner, link

import qfleet
from qfleet.core.errors import ProcessFault, UserError
from qfleet.transport import grpc_channel, registry
from qfleet.transport.client import FleetConnection
from qfleet.transport.fleet_pb2 import ExchangeRequest, HelloRequest
from qfleet.transport.grpc_channel import GrpcChannel

pytestmark = pytest.mark.timeout(60)
SESSION = "0123456789abcdef" * 2


def joined(name, index=0, claim="a-secret", token=JOIN_TOKEN, **more):
    """The hello of a process that knows the token for joiners, and perhaps more."""
    from qfleet.transport.security import claimed_name

    fields = {"protocol": grpc_channel.PROTOCOL, "version": qfleet.__version__, "session": SESSION, "role": "actor",
              "claim": claim, **more}
    return HelloRequest(name=name or claimed_name("host", claim, index), **fields)


def said(here, request, token=JOIN_TOKEN):
    """What is answered to a hello: the welcome, or the status and the text of a refusal."""
    caller = GrpcChannel(here.unix, token)
    try:
        return caller.hello(request)
    except grpc.RpcError as error:
        return error.code(), error.details()
    finally:
        caller.close()


@pytest.mark.parametrize(("name", "role"), [
    ("actor/0", "actor"), ("actor/7", "actor"), ("evaluator", "evaluator"), ("learner/0", "learner"),
    ("some-host/0", "actor")])
def test_a_member_that_joins_cannot_take_a_place_of_the_runs_own(tmp_path, name, role):
    with fake_learner(tmp_path / "c", "127.0.0.1:0") as here, link(here.unix, name, role) as owner:
        thief = FleetConnection(GrpcChannel(here.tcp, JOIN_TOKEN), name, role, patience_s=5.0)
        with pytest.raises(UserError, match=r"is not valid for this process|only processes that the run itself starts"):
            thief.hello()
        thief.close()
        owner.metrics.count("wire/x")
        here.drain_until(lambda: bool(here.stored))
        assert owner.failed is None and [member.incarnation for member in here.registry.members()] == [1]


def test_the_name_of_a_member_that_joined_is_its_own_and_outlives_its_process(tmp_path):
    with fake_learner(tmp_path / "c") as here:
        first = said(here, joined(None, session="1" * 32))
        assert (first.index, first.incarnation) == (2, 1)
        assert said(here, joined(joined(None).name, claim="another"))[0] == grpc.StatusCode.FAILED_PRECONDITION
        again = said(here, joined(None, session="2" * 32))
        assert (again.index, again.incarnation) == (2, 2), "its supervisor started it again"
        other = said(here, joined(None, claim="another"))
        assert (other.index, other.incarnation) == (3, 1)


def test_a_member_is_known_again_by_a_learner_that_was_resumed(tmp_path):
    with fake_learner(tmp_path / "c") as here:
        said(here, joined(None))
        state = here.registry.state_dict()
    with fake_learner(tmp_path / "c", state=state) as here:
        assert said(here, joined(joined(None).name, claim="another"))[0] == grpc.StatusCode.FAILED_PRECONDITION
        welcome = said(here, joined(None))
        assert (welcome.index, welcome.incarnation) == (2, 1)


def test_credentials_are_renewed_when_the_learner_is_started_again(tmp_path):
    with fake_learner(tmp_path / "c") as here, link(here.unix) as line:
        state = here.registry.state_dict()
        here.close()
        with fake_learner(tmp_path / "c", state=state) as second:
            line.metrics.count_steps(3)
            second.drain_until(lambda: sum(message.steps for message in second.stored) == 3)
            assert line.failed is None and line.welcome.epoch == second.published.epoch


def test_only_the_process_that_said_hello_speaks_for_its_place(tmp_path):
    """A large number of the victim's would make all its own messages repetitions."""
    with fake_learner(tmp_path / "c", "127.0.0.1:0") as here, link(here.unix) as victim:
        thief = GrpcChannel(here.tcp, JOIN_TOKEN)
        eventually(lambda: here.registry.members() != ())
        words = {"epoch": thief.pulse().epoch, "index": 0, "incarnation": 1, "sequence": 10**9}
        with pytest.raises(grpc.RpcError) as caught:
            thief.exchange(ExchangeRequest(**words).SerializeToString())
        assert caught.value.code() == grpc.StatusCode.ABORTED
        with pytest.raises(grpc.RpcError):
            thief.exchange(ExchangeRequest(**words, session=SESSION, leaving=True).SerializeToString())
        thief.close()
        victim.metrics.count_steps(5)
        here.drain_until(lambda: sum(message.steps for message in here.stored) == 5)
        assert here.duplicates == 0 and len(here.registry.members()) == 1


def test_invented_members_are_turned_away(tmp_path):
    with fake_learner(tmp_path / "c") as here:
        caller, refused = GrpcChannel(here.unix, JOIN_TOKEN), 0
        for number in range(50):
            with pytest.raises(grpc.RpcError):
                caller.hello(HelloRequest(protocol=grpc_channel.PROTOCOL, version=qfleet.__version__, role="actor",
                                          name=f"ghost-{number}/0", session=f"{number:032x}"))
            refused += 1
        caller.close()
        assert refused == 50 and here.registry.members() == ()


def test_the_number_of_members_that_join_is_bounded_and_does_not_concern_the_runs_own(tmp_path):
    with fake_learner(tmp_path / "c") as here:
        here.registry.most = 3
        answers = [said(here, joined(None, number, session=f"{number:032x}")) for number in range(5)]
        assert [answer.index for answer in answers[:3]] == [2, 3, 4]
        assert [answer[0] for answer in answers[3:]] == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 2
        assert "fleet.max_members" in answers[3][1]
        assert said(here, joined(None, 1, session="f" * 32)).incarnation == 2, "a place that is there can be taken over"
        with link(here.unix, "actor/1"), link(here.unix, "evaluator", "evaluator"):
            assert len(here.registry.members()) == 5
        here.registry.live_s = 0.0  # all of them are silent for longer
        assert said(here, joined(None, 4, session="e" * 32)).index == 2


def test_members_that_are_silent_for_long_are_forgotten(monkeypatch):
    now, book = [1000.0], registry.Registry(2, 30.0)
    monkeypatch.setattr(registry.time, "monotonic", lambda: now[0])
    book.hello("actor/0", "actor", "here", 1, "own")
    for number in range(100):
        book.hello(f"far/{number}", "actor", "there", 1, f"session {number}", own=False)
        book.set_member_state(2 + number, b"learnt")
        book.accept_sequence(2 + number, 1, 1)
    now[0] += registry.FORGET_S - 1
    book.record_heartbeat(2, 1, 0, 0)
    assert len(book.members()) == 101
    now[0] += 2
    assert [member.name for member in book.members()] == ["actor/0", "far/0"]
    state = book.state_dict()
    assert len(state["lives"]) == 2 and len(state["stored"]) == len(state["memories"]) == 1
    again = registry.Registry(2, 30.0)
    again.load_state_dict(state)
    now[0] += registry.FORGET_S + 1
    assert again.members() == () and [life[0] for life in again.state_dict()["lives"]] == ["actor/0"]


@pytest.mark.parametrize("wrong", [
    {"name": "a b"}, {"name": "actor/x"}, {"name": "<script>"}, {"name": "x" * 200}, {"session": ""}, {"session": "s"},
    {"session": "g" * 32}, {"host": "a\nb"}, {"host": "x" * 300}, {"role": "boss"}, {"role": "supervisor"},
    {"role": ""}])
def test_names_and_roles_are_checked(tmp_path, wrong):
    with fake_learner(tmp_path / "c") as here:
        code, _ = said(here, joined(**{"name": "actor/0", **wrong}), TOKEN)
        assert code == grpc.StatusCode.INVALID_ARGUMENT and here.registry.members() == ()


def test_a_superseded_process_is_no_users_mistake(tmp_path):
    """Its supervisor would end the whole run otherwise."""
    with fake_learner(tmp_path / "c") as here, link(here.unix) as old, link(here.unix):
        eventually(lambda: old.failed is not None)
        assert isinstance(old.failed, ProcessFault) and "newer process" in str(old.failed)


def test_messages_of_many_senders_do_not_fill_the_memory():
    from qfleet.transport.inbox import Inbox

    inbox, large = Inbox(4, max_bytes=2500), [ExchangeRequest(index=index, memory=bytes(1000)) for index in range(9)]
    assert [inbox.offer(message, True) for message in large] == [True] * 2 + [False] * 7
    assert inbox.pop() is large[0] and inbox.offer(large[2], True) and not inbox.offer(large[3], True)
    assert inbox.pop() and inbox.pop() and inbox.offer(ExchangeRequest(index=0, memory=bytes(9000)), True)
    assert not inbox.room(1, True) and not inbox.offer(large[1], True)
    assert inbox.room(1) and inbox.offer(large[1]), "the run's own processes do not wait for those that joined"
