"""Messages over real sockets: each is stored once and in order, whatever is lost, restarted or full."""

from __future__ import annotations

import logging
import threading
import time

import pytest
import torch
from transport_kit import LAYOUT, TOKEN, FakeLearner, Luck, Proxy, eventually, fake_learner, link, some_chunk, weights

from qfleet.core.clock import Progress
from qfleet.core.episode import Episode
from qfleet.core.evaluation import Score
from qfleet.transport import client, grpc_channel, outbox, published_state, remote
from qfleet.transport.client import ConnectionLost, FleetConnection
from qfleet.transport.grpc_channel import GrpcChannel
from qfleet.transport.inbox import decode_message
from qfleet.transport.weight_codec import pack_weights, unpack_weights

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(client, "HEARTBEAT_S", 0.2)


def lanes(stored):
    """The lanes of all episodes, in the order in which they were stored: the tests count with them."""
    return [episode.lane for message in stored for episode in message.episodes]


def test_an_actor_tells_and_hears(tmp_path):
    with fake_learner(tmp_path / "c") as here, link(here.unix) as line:
        assert (line.welcome.index, line.welcome.incarnation, line.welcome.actors) == (0, 1, 2)
        assert line.welcome.config_yaml == "seed: 1\n" and line.welcome.spec_json == "{}"
        replay = line.replay(LAYOUT, 2)
        line.clock.count_steps(5)
        assert replay.add(some_chunk(3)) == 0 and replay.add(some_chunk(4), None) == 1
        line.metrics.episode(Episode(2.5, 7, 1))
        here.drain_until(lambda: sum(len(message.parcels) for message in here.stored) == 2)
        got = [decode_message(message, LAYOUT) for message in here.stored]
        assert sum(delivery.steps for delivery in got) == 5
        assert [episode for delivery in got for episode in delivery.episodes] == [Episode(2.5, 7, 1, 0)]
        here.published.update_progress(1000, 50, "training")
        eventually(lambda: line.progress() == Progress(1000, 50))
        assert line.clock.steps == 1000 and line.wanted_version == -1
        here.published.publish(weights(3), 3)
        here.published.request_evaluation()
        eventually(lambda: line.wanted_version == 3)
        here.published.publish(weights(7), 7)
        here.published.request_final_evaluation()
        eventually(lambda: line.wanted_version == 7)
        here.published.stop()
        eventually(lambda: line.stopped)
        assert line.failed is None


def test_the_clock_counts_what_is_not_confirmed_yet(tmp_path):
    with fake_learner(tmp_path / "c") as here:
        here.published.update_progress(100, 0, "training")
        with link(here.unix, start=False) as line:
            line.replay(LAYOUT, 2)
            line.clock.count_steps(7)
            assert line.clock.steps == 107
            line.start()
            eventually(lambda: len(here.inbox) == 1)
            eventually(lambda: line.clock.steps == 100)


def test_an_evaluation_arrives_with_its_weights(tmp_path):
    with fake_learner(tmp_path / "c") as here, link(here.unix, "evaluator", "evaluator") as line:
        line.send_evaluation(Score([1.0, 3.0], [5, 6], 40, 2.5), weights(40))
        here.drain_until(lambda: bool(here.stored))
        (score, state), = decode_message(here.stored[0], LAYOUT).evaluations
        assert score.mean == 2.0 and (score.version, score.seconds) == (40, 2.5)
        assert torch.equal(state["b"], weights(40)["b"])
        assert here.stored[0].index == -1


def test_members_are_heard_of_and_leave(tmp_path):
    with fake_learner(tmp_path / "c") as here:
        here.published.update_progress(5, 6, "training")
        caller = GrpcChannel(here.unix, TOKEN)
        with link(here.unix, "far-1/0") as line:
            line.metrics.count_steps(9)
            here.drain_until(lambda: bool(here.stored))
            pulse = caller.pulse()
            member, = pulse.members
            assert (pulse.steps, pulse.updates, pulse.version, pulse.phase) == (5, 6, -1, "training")
            assert (member.name, member.role, member.index, member.steps, member.restarts) == \
                ("far-1/0", "actor", 2, 9, 0)
            assert 0 <= member.silent_s < 5 and 0 <= pulse.idle_s < 5
            eventually(lambda: caller.pulse().members[0].silent_s > 0.1)
            eventually(lambda: caller.pulse().members[0].silent_s < 0.1, 3)  # a heartbeat came
        assert list(caller.pulse().members) == []
        caller.close()


def send_many(line, count, pause_s=0.0):
    for number in range(count):
        line.metrics.count_steps(1)
        line.metrics.episode(Episode(0.0, 1, number))
        if pause_s:
            time.sleep(pause_s)


@pytest.mark.parametrize("direction", ["reply", "request"])
def test_what_was_lost_is_sent_again_and_stored_once(tmp_path, direction):
    with fake_learner(tmp_path / "c", "127.0.0.1:0") as here:
        proxy = Proxy(here.tcp.port)
        with link(proxy.address) as line:
            losses = iter(["cut", "cut"])
            proxy.fate = lambda way, data: next(losses, "pass") if way == direction and len(data) > 60 else "pass"
            send_many(line, 5)
            here.drain_until(lambda: lanes(here.stored) == [0, 1, 2, 3, 4])
            eventually(lambda: line.metrics.unconfirmed_steps == 0)
            here.drain()  # a repetition may have come meanwhile
            assert lanes(here.stored) == [0, 1, 2, 3, 4]
            line.metrics.count_steps(1)
            here.drain_until(lambda: sum(message.steps for message in here.stored) == 6)
            counted = {c.tag: c.by for message in here.stored for c in message.counters}
            assert counted["wire/retries"] >= 1 and counted["wire/bytes"] > 0
        assert proxy.lost >= 1
        proxy.close()


def test_a_reply_that_never_comes_ends_at_the_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(GrpcChannel.exchange, "__defaults__", (0.4,))
    with fake_learner(tmp_path / "c", "127.0.0.1:0") as here:
        proxy = Proxy(here.tcp.port)
        with link(proxy.address) as line:
            proxy.fate = lambda way, data: "drop" if way == "reply" else "pass"
            send_many(line, 1)
            here.drain_until(lambda: here.duplicates >= 1)
            proxy.fate = lambda way, data: "cut"
            time.sleep(0.5)
            proxy.fate = lambda way, data: "pass"
            here.drain_until(lambda: line.metrics.unconfirmed_steps == 0)
            assert lanes(here.stored) == [0]
        proxy.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_under_random_loss_everything_is_stored_once_and_in_order(tmp_path, seed):
    """Two actors, a line that breaks by chance, a learner that drains when it likes, one actor replaced in between."""
    luck = Luck(seed, 0.15)
    with fake_learner(tmp_path / "c", "127.0.0.1:0") as here:
        proxy = Proxy(here.tcp.port, luck)
        confirmed = {}
        with link(proxy.address, "actor/0") as steady:
            for life in range(20):
                if life >= 3 and proxy.lost > 5:  # until then the line was too good to prove anything
                    break
                with link(proxy.address, "actor/1") as line:
                    for number in range(25):
                        for who in (steady, line):
                            who.metrics.count_steps(1)
                        line.metrics.episode(Episode(0.0, 1, number))
                        steady.metrics.episode(Episode(0.0, 1, 25 * life + number))
                        time.sleep(0.01)
                        if number % 3 == 0:
                            here.drain()
                    here.drain_until(lambda line=line: line.metrics.unconfirmed_steps == 0)
                    confirmed[line.welcome.incarnation] = 25
            here.drain_until(lambda: steady.metrics.unconfirmed_steps == 0)
        luck.over = True
        here.drain()
        proxy.close()
    assert proxy.lost > 5, "the line was too good to prove anything"
    assert lanes(message for message in here.stored if message.index == 0) == list(range(25 * len(confirmed)))
    for incarnation in confirmed:
        mine = [m for m in here.stored if m.index == 1 and m.incarnation == incarnation]
        assert lanes(mine) == list(range(25)) and sum(m.steps for m in mine) == 25


def test_a_full_inbox_holds_the_actor_back_and_then_drains(tmp_path, monkeypatch):
    monkeypatch.setattr(outbox, "MAX_CHUNKS", 3)
    with fake_learner(tmp_path / "c", inbox_messages=2) as here, link(here.unix) as line:
        replay = line.replay(LAYOUT, 2)
        added = 0

        def fill():
            nonlocal added
            while replay.add(some_chunk()) is not None:
                added += 1
            return len(here.inbox) == 2 and line._probing

        eventually(fill)
        assert replay.add(some_chunk()) is None and added <= 12
        sent = here.registry.members()[0].heard
        eventually(lambda: here.registry.members()[0].heard > sent)  # who waits still shows that it lives
        assert len(here.inbox) == 2
        here.drain_until(lambda: sum(len(message.parcels) for message in here.stored) == added)
        eventually(lambda: replay.add(some_chunk()) is not None)
        here.drain_until(lambda: any(c.tag == "wire/stall_ms" for m in here.stored for c in m.counters))


def test_who_is_too_far_ahead_of_what_was_confirmed_waits(tmp_path):
    with fake_learner(tmp_path / "c") as here, link(here.unix, start=False) as line:
        replay = line.replay(LAYOUT, 2)
        line.clock.count_steps(2 * LAYOUT.chunk_steps - 1)
        assert replay.add(some_chunk()) is not None
        line.clock.count_steps(1)
        assert replay.add(some_chunk()) is None
        line.start()
        eventually(lambda: replay.add(some_chunk()) is not None)
        here.drain_until(lambda: sum(len(message.parcels) for message in here.stored) == 2)


def test_a_learner_that_was_resumed_is_greeted_again_and_nothing_is_stored_twice(tmp_path):
    first = FakeLearner(tmp_path / "c")
    with link(first.unix) as line:
        send_many(line, 3)
        first.drain_until(lambda: lanes(first.stored) == [0, 1, 2])
        eventually(lambda: line.metrics.unconfirmed_steps == 0)
        # What follows is in the checkpoint, but its confirmation never arrives.
        first.inbox.per_sender = 0
        line.metrics.episode(Episode(0.0, 1, 3))
        eventually(lambda: line._probing)
        assert first.registry.accept_sequence(line.welcome.index, line.welcome.incarnation, line._sequence)
        state = first.registry.state_dict()
        first.close()
        second = FakeLearner(tmp_path / "c", state=state)
        line.metrics.episode(Episode(0.0, 1, 4))
        second.drain_until(lambda: lanes(second.stored) == [4])
        assert second.duplicates == 1
        assert line.welcome.epoch == second.published.epoch and line.welcome.incarnation == 1
        assert line.failed is None
        second.close()


def test_a_learner_without_a_memory_takes_what_was_not_confirmed(tmp_path):
    first = FakeLearner(tmp_path / "c")
    with link(first.unix, "far/0") as line:
        send_many(line, 3)
        first.drain_until(lambda: line.metrics.unconfirmed_steps == 0)
        first.close()
        send_many(line, 2)
        time.sleep(0.2)
        second = FakeLearner(tmp_path / "c")
        second.drain_until(lambda: line.metrics.unconfirmed_steps == 0 and lanes(second.stored) == [0, 1])
        second.close()


def test_the_same_place_in_another_learner_is_not_the_same_place(tmp_path):
    """Both learners gave (2, 1) to the first joiner they saw: only the epoch tells whose message it is."""
    first = FakeLearner(tmp_path / "c")
    with link(first.unix, "far-a/0", start=False) as one:
        first.close()
        with fake_learner(tmp_path / "c") as second, link(second.unix, "far-b/0") as two:
            assert [(line.welcome.index, line.welcome.incarnation) for line in (one, two)] == [(2, 1), (2, 1)]
            one.metrics.episode(Episode(0.0, 1, 7))
            one.start()
            second.drain_until(lambda: lanes(second.stored) == [7])
            assert second.stored[0].index == one.welcome.index == 3 and two.failed is None


def test_a_superseded_process_has_to_leave(tmp_path):
    with fake_learner(tmp_path / "c") as here, link(here.unix) as old:
        eventually(lambda: here.registry.members() != ())
        with link(here.unix) as new:
            assert (new.welcome.index, new.welcome.incarnation) == (0, 2)
            eventually(lambda: old.failed is not None)
            assert "newer process" in str(old.failed) and not old.stopped
            send_many(new, 1)
            here.drain_until(lambda: lanes(here.stored) == [0])
            assert new.failed is None


def test_a_place_that_was_given_away_is_asked_for_again(tmp_path):
    with fake_learner(tmp_path / "c") as here, link(here.unix, "far-a/0") as one:
        assert one.welcome.index == 2
        here.registry.live_s = 0.0
        with link(here.unix, "far-b/0") as two:
            assert two.welcome.index == 2
            here.registry.live_s = 30.0
            eventually(lambda: one.welcome.index == 3)
            send_many(one, 1)
            send_many(two, 1)
            here.drain_until(lambda: {message.index for message in here.stored} == {2, 3})
            assert one.failed is None and two.failed is None


def test_patience_ends(tmp_path, caplog):
    gone = FakeLearner(tmp_path / "c")
    with link(gone.unix, patience_s=0.8) as line, caplog.at_level(logging.WARNING):
        gone.close()
        eventually(lambda: line.failed is not None)
        assert isinstance(line.failed, ConnectionLost) and str(gone.unix) in str(line.failed)
        assert [str(gone.unix) in record.getMessage() for record in caplog.records] == [True]


def test_who_waits_longer_than_patience_for_room_is_not_lost(tmp_path):
    with fake_learner(tmp_path / "c") as here, link(here.unix, patience_s=0.5) as line:
        here.inbox.per_sender = 0
        send_many(line, 1)
        time.sleep(1.2)
        assert line.failed is None
        here.inbox.per_sender = 1
        here.drain_until(lambda: lanes(here.stored) == [0])


def test_closing_ships_what_is_left(tmp_path):
    with fake_learner(tmp_path / "c") as here:
        line = FleetConnection(GrpcChannel(here.unix, TOKEN), "actor/0")
        line.hello()
        line.start()
        send_many(line, 4)
        line.close(flush_s=5.0)
        here.drain()
        assert lanes(here.stored) == [0, 1, 2, 3] and here.registry.members() == ()


def test_closing_waits_no_longer_than_it_was_told(tmp_path):
    gone = FakeLearner(tmp_path / "c")
    line = FleetConnection(GrpcChannel(gone.unix, TOKEN), "actor/0")
    line.hello()
    line.start()
    gone.close()
    send_many(line, 1)
    began = time.monotonic()
    line.close(flush_s=0.3)
    assert time.monotonic() - began < 3


def test_ticks_travel_together(tmp_path):
    with fake_learner(tmp_path / "c") as here, link(here.unix) as line:
        began = time.monotonic()
        while time.monotonic() - began < 0.5:
            line.metrics.count_steps(1)
            here.drain()
            time.sleep(0.001)
        assert len(here.stored) <= 0.5 / client.PERIOD_S + 2
        here.drain_until(lambda: line.metrics.unconfirmed_steps == 0)
        assert sum(message.steps for message in here.stored) == line.metrics.total_steps > 50


def test_weights_arrive_as_they_were_published(tmp_path):
    with fake_learner(tmp_path / "c") as here, link(here.unix) as line:
        assert line.weights.fetch(-1) is None and here.published.has_reader
        here.published.publish(weights(3), 3)
        assert not here.published.has_reader, "no member has fetched them yet"
        news = []
        eventually(lambda: bool(news.append(line.weights.fetch(-1)) or news[-1]))
        version, state = news[-1]
        assert version == 3 and state.keys() == weights(3).keys() and here.published.has_reader
        assert all(torch.equal(state[name], value) for name, value in weights(3).items())
        assert line.weights.fetch(3) is None
        for version in (4, 5, 6):
            here.published.publish(weights(version), version)
        eventually(lambda: bool(news.append(line.weights.fetch(3)) or news[-1]))
        assert news[-1][0] in (4, 5, 6) and here.published.fetch(5)[0] == 6
        eventually(lambda: here.registry.members()[0].version >= 4)


def test_a_resumed_learner_that_is_behind_is_believed(tmp_path):
    first = FakeLearner(tmp_path / "c")
    first.published.publish(weights(50), 50)
    with link(first.unix) as line, link(first.unix, "evaluator", "evaluator") as judge:
        eventually(lambda: line.weights.fetch(-1) is not None)
        assert judge.weights.fetch(-1)[0] == 50 and judge.weights.fetch(50) is None
        first.published.request_evaluation()
        eventually(lambda: judge.wanted_version == 50)
        first.close()
        second = FakeLearner(tmp_path / "c")
        second.published.publish(weights(20), 20)
        news = []
        eventually(lambda: bool(news.append(line.weights.fetch(50)) or news[-1]))
        assert news[-1][0] == 20
        eventually(lambda: judge.welcome.epoch == second.published.epoch)
        assert judge.weights.fetch(50)[0] == 20 and judge.wanted_version == -1
        second.close()


def test_an_evaluator_gets_the_newest_and_not_an_older_one(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "RETRY_S", 0.05)
    with fake_learner(tmp_path / "c") as here, link(here.unix, "evaluator", "evaluator") as line:
        for version in (1, 2, 3):
            here.published.publish(weights(version), version)
            time.sleep(0.05)
        assert line.weights.fetch(-1)[0] == 3 and line.weights.fetch(3) is None
        monkeypatch.setattr(remote, "NEWEST_S", 0.3)
        here.close()
        assert line.weights.fetch(3) is None


def test_sixteen_fetch_at_once_what_is_serialised_once(tmp_path, monkeypatch):
    packs = []
    monkeypatch.setattr(published_state, "pack_weights", lambda state: packs.append(1) or pack_weights(state))
    with fake_learner(tmp_path / "c") as here:
        here.published.publish(weights(7, size=300_000), 7)
        callers, found = [GrpcChannel(here.unix, TOKEN) for _ in range(16)], []

        def fetch(caller):
            found.append(grpc_channel.read_fetched(caller.fetch(-1).result()))

        threads = [threading.Thread(target=fetch, args=(caller,)) for caller in callers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 16 and len(packs) == 1
        for version, data in found:
            assert version == 7 and torch.equal(unpack_weights(data)["b"], weights(7, size=300_000)["b"])
        for caller in callers:
            caller.close()
