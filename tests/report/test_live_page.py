"""`qfleet watch`: what the page is told, who may ask, and what is refused. How it looks, a browser says."""

from __future__ import annotations

import http.client
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from urllib.parse import parse_qs, urlsplit

import pytest
from report_kit import records, write_run

from qfleet.cli.commands import main
from qfleet.report.live_page import LivePageServer, RunFollower, reachable
from qfleet.runs import membership as roll
from qfleet.runs.directory import RunDirectory
from qfleet.runs.lock import LockOwner
from qfleet.runs.membership import (
    MemberMonitor,
    read_members,
    record_exit,
    remove_members_of_learners,
    short_exit_text,
    write_members,
    write_members_of,
)

pytestmark = pytest.mark.timeout(60)


def member(name="actor/0", **changes):
    return {"name": name, "role": "actor", "host": "here", "pid": 7, "incarnation": 1, "steps": 100, "version": 4,
            "silent_s": 0.2, "live_s": 30.0} | changes


@pytest.fixture
def run(tmp_path):
    folder = write_run(tmp_path / "runs", "x", rows=records(1, 6))
    (folder / "lock").write_text(f"{LockOwner.current()}\n")
    return RunDirectory(folder)


@pytest.fixture
def served(run):
    servers = []

    def serve(token=None):
        server = LivePageServer(run, "127.0.0.1", 0, token)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return server

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def ask(server, path, **headers):
    line = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    line.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    reply = line.getresponse()
    return reply, reply.read()


# ---- What is known of a run ----

def test_curves_are_told_once(run):
    follower = RunFollower(run)
    first = follower.updates_since(-1)
    assert first["state"] == "running" and first["env"] == "ALE/Pong-v5" and first["film"] is None
    assert first["series"]["x"]["steps"] == [500 * i for i in range(1, 7)]
    assert follower.updates_since(first["version"])["series"] is None
    with run.metrics.open("a") as file:
        file.write(json.dumps({"step": 3500, "time_s": 10.0, "train/loss": 0.1}) + "\n")
    again = follower.updates_since(first["version"])
    assert again["series"]["x"]["steps"][-1] == 3500 and again["headline"].startswith("3,500 / 12,000 steps")


def test_what_a_resumed_run_has_forgotten_is_forgotten(run):
    follower = RunFollower(run)
    follower.updates_since(-1)
    with run.metrics.open("a") as file:
        file.write(json.dumps({"step": 1200, "time_s": 10.0, "train/loss": 0.1}) + "\n")
    assert follower.updates_since(-1)["series"]["x"]["steps"] == [500, 1000, 1200]


def test_a_long_run_costs_no_more_than_a_short_one(run):
    run.metrics.write_text("".join(json.dumps({"step": step, "time_s": step / 10, "train/loss": float(step)}) + "\n"
                                   for step in range(1, 20_001)))
    follower = RunFollower(run)
    series = follower.updates_since(-1)["series"]
    steps, losses = series["x"]["steps"], series["y"]["train/loss"]
    assert len(follower.known) <= 1100 and 250 <= len(steps) <= 500
    assert steps == sorted(steps) and steps[-1] == 20_000 and losses[0] < 100 and losses[-1] > 19_900
    assert all(abs(step - loss) < 60 for step, loss in zip(steps, losses, strict=True))


def test_the_newest_film_is_named(run):
    run.videos.mkdir()
    for age, name in enumerate(("step-2.mp4", "step-1.mp4", ".step-3.partial-1.mp4")):
        (run.videos / name).write_bytes(b"film")
        os.utime(run.videos / name, (1000 - age, 1000 - age))
    assert RunFollower(run).updates_since(-1)["film"] == "step-2.mp4"


def test_a_run_without_records_is_followed(tmp_path):
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    news = RunFollower(RunDirectory(folder)).updates_since(-1)
    assert news["headline"] == "no records yet" and news["state"] == "ended" and news["fraction"] == 0


def test_members_of_a_run_that_is_over_are_not_shown(run):
    write_members(run.path, [member()])
    assert len(RunFollower(run).updates_since(-1)["members"]) == 1
    (run.path / "lock").unlink()
    assert RunFollower(run).updates_since(-1)["members"] == []


def test_the_end_of_a_log_is_sent(run):
    assert RunFollower(run).updates_since(-1)["log"] == {"names": [], "name": "", "lines": []}
    (run.path / "logs").mkdir()
    (run.path / "logs" / "run.log").write_text("".join(f"line {i}\n" for i in range(99)))
    (run.path / "logs" / "actor-0.log").write_text("start\n")
    first = RunFollower(run).updates_since(-1)["log"]
    assert first["names"] == ["run", "actor-0"] and first["name"] == "run" and first["lines"][-1] == "line 98"
    assert RunFollower(run).updates_since(-1, "actor-0")["log"]["lines"] == ["start"]
    assert RunFollower(run).updates_since(-1, "../config")["log"]["name"] == "run", "only logs are shown"


def test_settings_that_the_user_has_changed_are_first(run):
    record = json.loads(run.record.read_text())
    record["attempts"][0]["sources"] = {"agent.n_step": "command line", "agent.double": "recipe x", "seed": "default"}
    run.record.write_text(json.dumps(record))
    rows = [(row["key"], row["source"]) for row in RunFollower(run).settings]
    assert rows[:2] == [("agent.n_step", "command line"), ("agent.double", "recipe x")]
    run.record.write_text("[]")
    assert {row["rank"] for row in RunFollower(run).settings} == {2}


def test_a_run_of_another_host_is_judged_by_its_files(run):
    """On a shared disk the process cannot be asked, but whoever lives goes on writing."""
    (run.path / "lock").write_text("7.boot-1.some-other-host\n")
    news = RunFollower(run).updates_since(-1)
    assert (news["state"], news["health"]) == ("elsewhere", "healthy")
    assert news["words"].startswith("runs on another host: its files changed ")
    hour = time.time() - 3600
    os.utime(run.metrics, (hour, hour))
    news = RunFollower(run).updates_since(-1)
    assert news["health"] == "unknown" and "may or may not be running" in news["words"]
    write_members(run.path, [member()])
    assert RunFollower(run).updates_since(-1)["health"] == "healthy", "its roll is written every second"


def test_the_learner_of_a_run_that_is_over(run):
    assert RunFollower(run).updates_since(-1)["health"] == "healthy"
    (run.path / "lock").write_text("999999999.boot-1." + platform.node())
    assert RunFollower(run).updates_since(-1)["health"] == "lost"
    (run.path / "lock").unlink()
    assert RunFollower(run).updates_since(-1)["health"] == "ended"


def test_a_run_that_is_over_has_no_rates_no_time_left_and_no_remedy(run):
    news = RunFollower(run).updates_since(-1)
    assert news["headline"] == "3,000 / 12,000 steps · 25% · 0:27 left" and news["limit"] and news["updates_s"]
    assert {"steps/s", "updates/s"} <= dict(news["figures"]).keys()
    (run.path / "lock").unlink()
    news = RunFollower(run).updates_since(-1)
    assert news["headline"] == "3,000 / 12,000 steps · 25%" and news["limit"] is None and news["updates_s"] is None
    assert not {"steps/s", "updates/s"} & dict(news["figures"]).keys()


def test_a_fleet_has_all_its_figures(run):
    figures = dict(RunFollower(run).updates_since(-1)["figures"])
    assert {"eval", "samples/insert", "policy lag", "steps/s", "actors"} <= figures.keys()
    assert figures["policy lag"] == "21", "that of the actors, not what one of them fetched last"


def test_what_is_no_number_is_no_figure(run):
    with run.metrics.open("a") as file:
        file.write(json.dumps({"step": 3500, "time_s": "soon", "train/loss": "high", "eval/mean_reward": [1],
                               "rollout/ep_rew_mean": {"a": 1}, "updates": None, "time/fps": 31.0}) + "\n")
    news = RunFollower(run).updates_since(-1)
    assert news["series"]["x"]["steps"][-1] == 3500 and news["series"]["y"]["time/fps"][-1] == 31
    assert news["series"]["y"]["train/loss"][-1] is None


# ---- Who takes part ----

def at(monkeypatch, now, folder, *members):
    monkeypatch.setattr(roll.time, "time", lambda: now)
    write_members(folder, members)


def test_rates_and_lives_are_told(tmp_path, monkeypatch):
    seen = MemberMonitor(tmp_path)
    at(monkeypatch, 100.0, tmp_path, member(silent_s=0.0))
    [row] = seen.poll(100.0)
    assert row["rate"] is None and row["health"] == "healthy"
    at(monkeypatch, 102.0, tmp_path, member(silent_s=0.0, steps=300))
    assert seen.poll(102.0)[0]["rate"] == 100
    at(monkeypatch, 108.5, tmp_path, member(silent_s=6.5, steps=300))
    [row] = seen.poll(108.5)
    assert row["health"] == "silent" and row["rate"] is None
    assert seen.poll(200.0)[0]["health"] == "lost", "no record or heartbeat was written since"
    at(monkeypatch, 201.0, tmp_path, member(silent_s=0.0, incarnation=2, steps=0))
    assert seen.poll(201.0)[0]["health"] == "healthy"
    assert [text for _, text in seen.events] == [
        "actor/0: no heartbeat for 6 s", "actor/0: no heartbeat for 98 s",
        "actor/0 restarted (start 2)"]


def test_somebody_who_was_slow_is_heard_of_again(tmp_path, monkeypatch):
    seen = MemberMonitor(tmp_path)
    for now, silent in ((10.0, 0.0), (17.0, 7.0), (18.0, 0.1)):
        at(monkeypatch, now, tmp_path, member(silent_s=silent))
        seen.poll(now)
    assert [text for _, text in seen.events][-1] == "actor/0: heartbeat again"


KILLED = "was killed by SIGKILL: perhaps out of memory, lower env.lanes or actors"


def test_who_died_is_down_at_once_and_the_cause_is_told(tmp_path, monkeypatch):
    seen = MemberMonitor(tmp_path)
    at(monkeypatch, 100.0, tmp_path, member(silent_s=0.0), member("actor/1", pid=8, silent_s=0.0))
    assert [row["health"] for row in seen.poll(100.0)] == ["healthy", "healthy"]
    record_exit(tmp_path, "actor/0", 7, KILLED)
    dead, other = seen.poll(100.5)
    assert (dead["health"], dead["words"], dead["rate"]) == ("down", "killed (SIGKILL), restarting", None)
    assert (other["health"], other["words"]) == ("healthy", None)
    at(monkeypatch, 104.0, tmp_path, member(silent_s=0.0, incarnation=2, pid=9))
    assert seen.poll(104.0)[0]["health"] == "healthy"
    assert [text for _, text in seen.events] == [f"actor/0 {KILLED}", "actor/0 restarted (start 2)"]


def test_a_number_that_was_given_again_is_another_process(tmp_path, monkeypatch):
    """After a container's restart the same numbers come back, and old exits are no news."""
    monkeypatch.setattr(roll.time, "time", lambda: 10.0)
    record_exit(tmp_path, "actor/0", 7, KILLED)
    at(monkeypatch, 500.0, tmp_path, member(silent_s=0.0))
    seen = MemberMonitor(tmp_path)
    assert seen.poll(500.0)[0]["health"] == "healthy" and not seen.events


def test_only_the_last_exits_are_kept(tmp_path):
    for number in range(1, 80):
        record_exit(tmp_path, "actor/0", number, "ended with exit code 1")
    kept = json.loads((tmp_path / roll.EXITS_FILE).read_text())["members"]
    assert len(kept) == roll.MOST_EXITS and kept[-1]["pid"] == 79
    assert (
        short_exit_text(kept[-1]["how"]) == "ended with exit code 1" and short_exit_text(KILLED) == "killed (SIGKILL)"
    )


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"at": "x", "members": []}', '{"at": 1, "members": 3}'])
def test_a_roll_that_is_none_is_nobody(tmp_path, text):
    (tmp_path / roll.MEMBERS_FILE).write_text(text)
    assert read_members(tmp_path) == {} and MemberMonitor(tmp_path).poll(1.0) == []


def test_the_members_of_all_learners_are_read_as_of_the_newest_list(tmp_path, monkeypatch):
    monkeypatch.setattr(roll.time, "time", lambda: 10.0)
    write_members_of(tmp_path, 1, [member("actor/1", silent_s=0.5)])
    monkeypatch.setattr(roll.time, "time", lambda: 12.0)
    write_members(tmp_path, [member("actor/0", silent_s=0.5)])
    found = read_members(tmp_path)
    assert found["at"] == 12.0
    assert [(each["name"], each["silent_s"]) for each in found["members"]] == [("actor/0", 0.5), ("actor/1", 2.5)]
    assert [row["health"] for row in MemberMonitor(tmp_path).poll(15.0)] == ["healthy", "silent"]
    remove_members_of_learners(tmp_path)
    assert [each["name"] for each in read_members(tmp_path)["members"]] == ["actor/0"]


def test_a_roll_that_cannot_be_written_is_no_failure(tmp_path):
    write_members(tmp_path / "gone", [member()])
    assert read_members(tmp_path / "gone") == {}


# ---- Who may ask ----

def test_the_page_and_its_news(served):
    server = served()
    reply, text = ask(server, "/")
    assert reply.status == 200 and b'<main id="page">' in text and "connect-src 'self'" in text.decode()
    assert reply.headers["X-Frame-Options"] == "DENY" and reply.headers["Cache-Control"] == "no-store"
    for query in ("", "?seen=-1", "?seen=nonsense"):
        reply, text = ask(server, f"/news{query}")
        assert reply.headers["Content-Type"] == "application/json" and json.loads(text)["series"]["x"]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_other_names_for_this_machine_are_refused(served, host):
    assert ask(served(), "/news", Host=host)[0].status == 403
    assert ask(served(), "/news", Host="localhost:99")[0].status == 200


@pytest.mark.parametrize("path", ["/film/../config.yaml", "/film/%2e%2e/config.yaml", "/config.yaml", "/film/",
                                  "/film/x.mp4", "/../../etc/passwd", "//etc/passwd"])
def test_nothing_but_films_is_given_out(served, path):
    assert ask(served(), path)[0].status == 404


def test_films_are_given_out_in_parts(served, run):
    run.videos.mkdir()
    (run.videos / "a b.mp4").write_bytes(bytes(range(100)))
    server = served()
    reply, data = ask(server, "/film/a%20b.mp4")
    assert (reply.status, len(data), reply.headers["Content-Type"]) == (200, 100, "video/mp4")
    reply, data = ask(server, "/film/a%20b.mp4", Range="bytes=10-19")
    assert (reply.status, data, reply.headers["Content-Range"]) == (206, bytes(range(10, 20)), "bytes 10-19/100")
    assert ask(server, "/film/a%20b.mp4", Range="bytes=90-")[1] == bytes(range(90, 100))
    assert ask(server, "/film/a%20b.mp4", Range="bytes=100-")[0].status == 416


def test_without_the_token_nothing_is_told(served):
    server = served("secret-word")
    for path in ("/", "/news", "/film/x.mp4", "/?token=wrong", "/?token=", "/news?token=secret-word"):
        reply, text = ask(server, path)
        assert reply.status == 401 and b"x" not in text.replace(b"fleet", b"")
    assert ask(server, "/news", Authorization="Bearer wrong")[0].status == 401
    assert ask(server, "/news", Cookie="nonsense; =;")[0].status == 401


def test_the_token_becomes_a_cookie(served):
    server = served("secret-word")
    parts = urlsplit(server.url)
    reply, _ = ask(server, f"{parts.path}?{parts.query}")
    assert reply.status == 303 and reply.headers["Location"] == "/"
    cookie = reply.headers["Set-Cookie"]
    assert "HttpOnly" in cookie and "SameSite=Lax" in cookie
    assert ask(server, "/news", Cookie=cookie.partition(";")[0])[0].status == 200
    assert ask(server, "/news", Authorization="Bearer secret-word", Host="evil.example")[0].status == 200


@pytest.mark.parametrize("token", ['a;b', 'a,b', 'a"b', '"a;b\\"', "a=b&c%3B+d", "x" * 4096])
def test_a_token_of_any_characters_lets_a_browser_in(served, token):
    server = served(token)
    parts = urlsplit(server.url)
    cookie = ask(server, f"{parts.path}?{parts.query}")[0].headers["Set-Cookie"]
    kept = cookie.partition(";")[0]
    assert ask(server, "/news", Cookie=f"other=1; {kept}; more=2")[0].status == 200
    assert token not in cookie, "a token may be that of a fleet, too"
    assert ask(server, "/news", Cookie=f"{kept[:-1]}x")[0].status == 401


def test_films_behind_a_link_are_not_served(served, run, tmp_path):
    private = tmp_path / "private"
    private.mkdir()
    (private / "home.mp4").write_bytes(b"secret")
    server = served()
    run.videos.symlink_to(private)
    assert RunFollower(run).updates_since(-1)["film"] is None
    assert ask(server, "/film/home.mp4")[0].status == 404
    run.videos.unlink()
    run.videos.mkdir()
    (run.videos / "home.mp4").symlink_to(private / "home.mp4")
    assert RunFollower(run).updates_since(-1)["film"] is None and ask(server, "/film/home.mp4")[0].status == 404


@pytest.mark.parametrize("name", ["metrics.jsonl", "fleet.json", "exits.json"])
def test_a_live_page_follows_no_links(run, tmp_path, name):
    private = tmp_path / "private"
    private.write_text('{"step": 7, "train/loss": 7.0}\n' if name == "metrics.jsonl" else json.dumps(
        {"at": time.time(), "members": [{"name": "secret", "at": time.time(), "pid": 1, "how": "died"}]}))
    (run.path / name).unlink(missing_ok=True)
    (run.path / name).symlink_to(private)
    news = RunFollower(run).updates_since(-1)
    assert news["members"] == [] and news["events"] == []
    assert news["series"]["y"] == {} or name != "metrics.jsonl"


def test_all_addresses_are_told_as_one_that_others_can_open(run):
    server = LivePageServer(run, "0.0.0.0", 0, "secret-word")
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        assert "0.0.0.0" not in "".join(server.urls) and all(url.endswith("?token=secret-word") for url in server.urls)
        first = urlsplit(server.url)
        line = http.client.HTTPConnection(first.hostname, first.port, timeout=20)
        line.request("GET", f"/?{first.query}")
        assert line.getresponse().status == 303
    finally:
        server.shutdown()
        server.server_close()


def test_without_a_way_out_the_name_is_told(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "learner")
    monkeypatch.setattr(socket.socket, "connect", no_way)
    assert reachable("0.0.0.0") == ["learner"] and reachable("10.1.2.3") == ["10.1.2.3"]


def no_way(self, address):
    raise OSError("no route to host")


# ---- The verb ----

def test_without_a_name_the_newest_that_runs_is_taken_or_else_the_newest(run):
    from argparse import Namespace

    from qfleet.cli.pages import _named_or_newest

    newer = write_run(run.path.parent, "newer")
    os.utime(newer)
    args = Namespace(words=[], root=str(run.path.parent))
    assert _named_or_newest(args).name == "x"
    (run.path / "lock").unlink()
    os.utime(run.path, (1.0, 1.0))
    assert _named_or_newest(args).name == "newer"


@pytest.mark.parametrize(("words", "told"), [
    (["watch", "gone"], "no run 'gone'"), (["watch", "--root", "nowhere"], "there is no run in nowhere to watch"),
    (["watch", "x", "--listen", "0.0.0.0:80", "--port", "1"], "leave out --port"),
    (["watch", "x", "--listen", "nonsense"], "is not an address"), (["watch", "x", "--listen", "unix:/x"], "HOST:PORT"),
    (["watch", "x", "--token-file", "t"], "needs no token"), (["watch", "x", "--port", "70000"], "is not a port"),
    (["watch", "x", "--listen", "0.0.0.0:0", "--token-file", "t"], "token file t does not exist")])
def test_mistakes_are_told(run, monkeypatch, capsys, words, told):
    monkeypatch.chdir(run.path.parent.parent)
    assert main(words) == 2
    err = capsys.readouterr().err
    assert told in err and "Traceback" not in err


def test_a_port_that_is_taken(run, served, monkeypatch, capsys):
    monkeypatch.chdir(run.path.parent.parent)
    taken = served().server_address[1]
    assert main(["watch", "x", "--port", str(taken)]) == 2 and "the port is in use" in capsys.readouterr().err


@contextmanager
def watching(run, *words):
    """The real command and where it says that it serves."""
    process = subprocess.Popen([sys.executable, "-m", "qfleet", "watch", *words], stdout=subprocess.PIPE, text=True,
                               cwd=run.path.parent.parent, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    try:
        assert process.stdout.readline() == "runs/x is running\n"
        yield process, urlsplit(process.stdout.readline().split()[1])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def told_by(url, path, **headers):
    line = http.client.HTTPConnection(url.hostname, url.port, timeout=20)
    line.request("GET", path, headers=headers)
    reply = line.getresponse()
    return reply.status, reply.read()


@pytest.mark.slow
def test_the_real_command_serves_until_it_is_interrupted(run):
    older = write_run(run.path.parent, "older")
    os.utime(older)  # touched last, but it does not run
    with watching(run, "--port", "0") as (process, url):
        assert url.query == "" and json.loads(told_by(url, "/news")[1])["name"] == "x"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


@pytest.mark.slow
def test_who_listens_without_a_token_gets_a_fresh_one_that_is_printed_and_demanded(run):
    tokens = []
    for _ in range(2):
        with watching(run, "x", "--listen", "127.0.0.1:0") as (_, url):
            [token] = parse_qs(url.query)["token"]
            assert len(token) >= 32
            for path in ("/", "/news", "/?token=", *(f"/?token={old}" for old in tokens)):
                assert told_by(url, path)[0] == 401
            assert told_by(url, f"/?token={token}")[0] == 303
            status, news = told_by(url, "/news", Authorization=f"Bearer {token}")
            assert status == 200 and json.loads(news)["name"] == "x"
            tokens.append(token)
    assert tokens[0] != tokens[1]
