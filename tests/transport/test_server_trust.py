"""A process that holds the port of a fleet, or stands between: it learns no token, and names no code."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest
from transport_kit import JOIN_TOKEN, FakeLearner, Proxy, fake_learner

from qfleet.cli import commands
from qfleet.core.errors import UserError
from qfleet.launch.endpoint import GrpcEndpoint
from qfleet.transport.address import Address
from qfleet.transport.fleet_pb2 import PulseReply, Welcome
from qfleet.transport.grpc_channel import SERVICE, GrpcChannel

pytestmark = pytest.mark.timeout(60)
EVIL = Welcome(epoch="e", config_yaml="env: {id: 'no_such_module:Env'}\n", spec_json="{}", actors=1).SerializeToString()


class Impostor:
    """Answers every call without knowing the token; `seen` is all that it was sent."""

    def __init__(self, answers):
        self.seen: list[str] = []
        handlers = {name: grpc.unary_unary_rpc_method_handler(self._answer(reply)) for name, reply in answers.items()}
        self._server = grpc.server(ThreadPoolExecutor(4))
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self.address = Address("127.0.0.1", self._server.add_insecure_port("127.0.0.1:0"))
        self._server.start()

    def _answer(self, reply):
        def answer(data, context):
            self.seen += [f"{key}: {value!r}" for key, value in context.invocation_metadata()] + [repr(data)]
            return reply(context) if callable(reply) else reply
        return answer

    def close(self):
        self._server.stop(0).wait()


@contextmanager
def impostor(**answers):
    made = Impostor({"Hello": EVIL, "Pulse": PulseReply(epoch="e").SerializeToString(), **answers})
    try:
        yield made
    finally:
        made.close()


def contact(tmp_path, address, name="here-1/0"):
    (tmp_path / "token").touch(0o600)
    (tmp_path / "token").write_text(JOIN_TOKEN)
    return GrpcEndpoint(str(address), name, str(tmp_path / "token"), patience_s=5.0)


def forged(context):
    """A proof by a process that does not know the token."""
    from qfleet.transport.fleet_pb2 import ProveReply

    return ProveReply(challenge="0" * 32, proofs=["", "0" * 64, *dict(context.invocation_metadata()).values()]
                      ).SerializeToString()


@pytest.mark.parametrize("prove", [None, b"", b"\xff\xff", forged])
def test_the_holder_of_a_loopback_port_learns_no_token_and_is_not_believed(tmp_path, prove):
    with impostor(**({} if prove is None else {"Prove": prove})) as fake:
        line = contact(tmp_path, fake.address).connect("actor")
        with pytest.raises(UserError, match=r"does not know this token|does not answer as a qfleet fleet"):
            line.hello()
        line.close()
        assert not any(JOIN_TOKEN in text for text in fake.seen)


def test_join_ends_before_anything_is_started_for_an_impostor(tmp_path, capsys):
    with impostor() as fake:
        place = contact(tmp_path, fake.address)
        assert commands.main(["join", place.address, "--token-file", place.token_file, "--actors", "1"]) == 2
        assert not any(JOIN_TOKEN in text for text in fake.seen)
    said = capsys.readouterr().err
    assert said.startswith("error: ") and place.address in said and "Traceback" not in said


def test_a_process_in_between_cannot_change_which_code_is_named(tmp_path):
    """It passes on the proof of the real fleet, which it cannot make, and answers the hello itself."""
    with fake_learner(tmp_path / "c", "127.0.0.1:0") as here:
        def relayed(context):
            nonce = [pair for pair in context.invocation_metadata() if pair[0].startswith("qfleet")]
            with grpc.insecure_channel(str(here.tcp)) as line:
                return line.unary_unary(f"/{SERVICE}/Prove")(b"", metadata=nonce, timeout=5)

        with impostor(Prove=relayed) as fake:
            line = contact(tmp_path, fake.address).connect("actor")
            with pytest.raises(UserError, match="was changed in transit"):
                line.hello()
            line.close()
            assert not any(JOIN_TOKEN in text for text in fake.seen)


def test_the_token_does_not_travel_to_the_real_fleet_either(tmp_path):
    sent = []
    with fake_learner(tmp_path / "c", "127.0.0.1:0") as here:
        proxy = Proxy(here.tcp.port, lambda way, data: sent.append(data) or "pass")
        caller = GrpcChannel(proxy.address, JOIN_TOKEN)
        caller.pulse()
        caller.close()
        proxy.close()
    assert sent and JOIN_TOKEN.encode() not in b"".join(sent)


def test_credentials_that_were_seen_are_of_no_use_to_the_next_life_of_a_fleet(tmp_path):
    with fake_learner(tmp_path / "c") as here:
        caller = GrpcChannel(here.unix, JOIN_TOKEN)
        caller.pulse()
        seen = caller._credential.proof.metadata
        caller.close()
    second = FakeLearner(tmp_path / "c")
    with grpc.insecure_channel(str(second.unix)) as line, pytest.raises(grpc.RpcError) as caught:
        line.unary_unary(f"/{SERVICE}/Pulse")(b"", metadata=seen, timeout=5)
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
    second.close()
