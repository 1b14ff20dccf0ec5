"""Who knocks at a fleet's port: joiners with the wrong papers are told so and leave, strangers disturb nobody."""

import os
import re
import shutil
import socket
import textwrap
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from hosts_kit import SMALL, Watch, Yard, certificate, crowd, free_port, invitation

import qfleet
from qfleet.cli import commands
from qfleet.transport.address import parse_address
from qfleet.transport.grpc_channel import PROTOCOL, SERVICE, Credential
from qfleet.transport.security import read_token, write_token

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FIELD = textwrap.dedent("""
    import time
    import gymnasium
    import numpy as np

    class Field(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(0, 1, ({size},), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            self.t = 0
            return np.zeros({size}, np.float32), {{}}

        def step(self, action):
            time.sleep(0.004)
            self.t += 1
            return np.full({size}, self.t / 50, np.float32), 1.0, self.t == 50, False, {{}}
""")
ENDLESS = [*SMALL, "total_steps=10_000_000", "replay.capacity=2000", "run.name=live"]


@pytest.fixture
def yard(tmp_path):
    with closing(Yard(tmp_path)) as made:
        yield made


def quiet_log(run, lines=12):
    """Nobody outside can make a learner write much."""
    text = (run / "logs" / "learner.log").read_text()
    assert "Traceback" not in text and len(text.splitlines()) <= lines, text


def another_version(folder: Path) -> str:
    """A copy of this package that says it is another."""
    shutil.copytree(Path(qfleet.__file__).parent, folder / "qfleet", ignore=shutil.ignore_patterns("__pycache__"))
    for name, old, new in (("__init__.py", f'__version__ = "{qfleet.__version__}"', '__version__ = "9.9.9"'),
                           ("transport/grpc_channel.py", f"PROTOCOL = {PROTOCOL}\n", "PROTOCOL = 99\n")):
        path = folder / "qfleet" / name
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
    return str(folder)


def test_strangers_and_misfits_at_the_port_of_a_live_run(yard, tmp_path):
    """At IPv6's loopback; the printed command works as it stands; what does not fit is refused with both sides."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "field.py").write_text(FIELD.format(size=4))
    (elsewhere / "field.py").write_text(FIELD.format(size=5))
    head = yard.run("train", "field:Field", *ENDLESS, "fleet.max_message_mb=1", "--listen", "[::1]:0")
    words = invitation(head)
    place, token = words[4], Path(words[6])
    assert re.fullmatch(r"\[::1\]:[1-9][0-9]+", place) and token.stat().st_mode & 0o77 == 0
    other = write_token(tmp_path / "other") and tmp_path / "other"
    certificate(tmp_path, "ca")
    refused = {
        "does not know this token": yard.join(place, token=other),
        "does not speak TLS": yard.join(place, "--tls-ca", str(tmp_path / "ca.pem"), token=token),
        rf"protocol 99 \(qfleet 9\.9\.9\), this fleet protocol {PROTOCOL} \(qfleet {qfleet.__version__}\)":
            yard.join(place, token=token, PYTHONPATH=another_version(tmp_path / "old")),
        rf"fleet at {re.escape(place)} uses field:Field .*obs 4.*on this host field:Field .*obs 5":
            yard.join(place, token=token, cwd=elsewhere),
    }
    with Watch(place, token) as watch:
        head.until(lambda: watch.steps > 100)
        port = ("::1", int(place.rpartition(":")[2]))
        with crowd(port, 200) as lines:
            for line, noise in zip(lines, [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", os.urandom(65536), b"\x16\x03\x01"],
                                   strict=False):
                line.sendall(noise)
            oversized(place, token)
            head.until(watch.grows(100))
            for text, joiner in refused.items():
                assert re.search(text, joiner.ends(2)), joiner.said
            guest = yard.shell([*words, "--actors", "1"])
            head.until(lambda: any(member.index == 1 and member.steps > 100 for member in watch.pulse().members))
            assert sum(member.role == "actor" for member in watch.pulse().members) == 2  # none of the misfits counts
    head.interrupt()
    head.ends(130)
    guest.ends(0, 30)
    quiet_log(tmp_path / "runs" / "live")


def oversized(place, token):
    with grpc.insecure_channel(place) as line, pytest.raises(grpc.RpcError) as caught:
        metadata = Credential(line, read_token(token), parse_address(place)).prove().metadata
        line.unary_unary(f"/{SERVICE}/Exchange")(bytes(2 << 20), timeout=10, metadata=metadata)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_tls_with_certificates_on_both_sides(yard, tmp_path):
    (tmp_path / "field.py").write_text(FIELD.format(size=4))
    for name in ("ca", "stranger"):
        certificate(tmp_path, name)
    cert, key = certificate(tmp_path, "fleet", "DNS:localhost", "IP:127.0.0.1", authority=tmp_path / "ca")
    mine, its_key = certificate(tmp_path, "joiner", authority=tmp_path / "ca")
    port = free_port()
    place, name = f"127.0.0.1:{port}", f"localhost:{port}"
    head = yard.run("train", "field:Field", *ENDLESS, "total_steps=600", f"fleet.tls_cert={cert}",
                    f"fleet.tls_key={key}", f"fleet.tls_ca={tmp_path / 'ca.pem'}", f"fleet.advertise={name}",
                    "--listen", place, "--token-file", str(yard.token), "--no-local-actors")
    words = invitation(head)
    assert words[4] == name and words[-6:] == ["--tls-ca", str(cert), "--tls-cert", "YOUR.pem", "--tls-key", "YOUR.key"]
    ca, show = ["--tls-ca", str(tmp_path / "ca.pem")], ["--tls-cert", str(mine), "--tls-key", str(its_key)]
    refused = {
        "not signed by the authority": yard.join(place, "--tls-ca", str(tmp_path / "stranger.pem"), *show),
        rf"no answer from {place} for 2 s .*do both sides agree on TLS": yard.join(place, "--patience", "2"),
        rf"no answer from {place} for 2 s .*client certificates": yard.join(place, *ca, "--patience", "2"),
    }
    for text, joiner in refused.items():
        assert re.search(text, joiner.ends(2)), joiner.said
    friend = yard.shell([*words[:-4], *show, "--actors", "1"])
    head.ends(0)
    friend.ends(0, 30)
    quiet_log(tmp_path / "runs" / "live")


@pytest.mark.parametrize(("args", "words"), [
    (["train", "catch", "--listen", "0.0.0.0:0"], r"needs fleet\.token_file.*openssl rand"),
    (["train", "catch", "--listen", "[::]:0"], r"needs fleet\.token_file"),
    (["train", "catch", "--listen", "127.0.0.1:{taken}"], r"127\.0\.0\.1:{taken} \(Address already in use\)"),
    (["train", "catch", "--listen", "203.0.113.7:4440", "--token-file", "good"], r"203\.0\.113\.7:4440.*this machine"),
    (["train", "catch", "--listen", "127.0.0.1:0", "--token-file", "open"], "chmod 600 open"),
    (["train", "catch", "--listen", "127.0.0.1:0", "--token-file", "none"], "token file none does not exist"),
    (["train", "catch", "--no-local-actors"], r"fleet\.local_actors=false without fleet\.listen"),
    (["train", "catch", "--listen", "127.0.0.1:0", "fleet.tls_cert=good"], r"without fleet\.tls_key"),
    (["train", "catch", "--listen", "127.0.0.1:0", "fleet.advertise=here:0"], "its port '0'"),
    (["join", "127.0.0.1:{taken}", "--token-file", "open"], "chmod 600 open"),
    (["join", "127.0.0.1:{taken}", "--token-file", "none"], "token file none does not exist"),
    (["join", "127.0.0.1:{taken}", "--token-file", "good", "--tls-ca", "none.pem"], "none.pem does not exist"),
    (["join", "nowhere", "--token-file", "good"], "HOST:PORT is needed"),
])
def test_what_cannot_work_is_refused_before_anything_is_started(tmp_path, monkeypatch, capsys, args, words):
    monkeypatch.chdir(tmp_path)
    write_token("good")
    write_token("open")
    Path("open").chmod(0o644)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = str(listener.getsockname()[1])
        assert commands.main([word.replace("{taken}", taken) for word in args]) == 2
    said = capsys.readouterr().err
    assert re.search(words.replace("{taken}", taken), said) and "Traceback" not in said, said
    assert not Path("runs").exists() or not list(Path("runs").iterdir())


def test_who_waits_for_nobody_gives_up(yard):
    place = f"127.0.0.1:{free_port()}"
    said = yard.join(place, "--patience", "1").ends(2)
    assert f"no answer from {place} yet" in said and f"no answer from {place} for 1 s" in said
