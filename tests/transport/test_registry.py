"""Places in the fleet, what counts as stored, and what is believed of a message."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_kit import LAYOUT, SPEC, some_chunk, weights

from qfleet.core.env import Box
from qfleet.core.episode import Episode
from qfleet.core.evaluation import Score
from qfleet.core.replay import Chunk, Window
from qfleet.replay.chunker import Chunker
from qfleet.replay.codec import Codec, PackedChunk
from qfleet.replay.layout import Layout
from qfleet.runs import state_tree
from qfleet.transport.fleet_pb2 import ExchangeRequest
from qfleet.transport.inbox import Inbox, decode_message
from qfleet.transport.outbox import Outbox
from qfleet.transport.registry import MAX_PAST_INCARNATIONS, Registry, merge_registries


def registry(actors=2, live_s=30.0):
    return Registry(actors, live_s)


def greet(book, name, session="s", role="actor"):
    return book.hello(name, role, "host", 1, session)


def test_local_names_have_their_own_index():
    book = registry()
    assert greet(book, "actor/1", "a") == (1, 1)
    assert greet(book, "actor/0", "b") == (0, 1)
    assert greet(book, "actor/1", "c") == (1, 2)


def test_joiners_come_after_the_planned_and_fill_gaps_that_nobody_lives_in():
    book = registry(actors=3)
    assert [greet(book, f"far/{i}", f"s{i}")[0] for i in range(3)] == [3, 4, 5]
    assert greet(book, "far/1", "again") == (4, 2)
    book.deregister(4, 2)
    assert greet(book, "new/0", "n") == (4, 3)
    assert greet(book, "far/1", "again") == (6, 1), "its place was given away"


def test_the_silent_lose_their_place():
    book = registry(actors=0, live_s=0.0)
    assert greet(book, "a/0", "a") == (0, 1) and greet(book, "b/0", "b") == (0, 2)
    assert book.record_heartbeat(0, 1, 0, 0) == "unknown" and book.record_heartbeat(0, 2, 0, 0) == "current"


def test_others_than_actors_are_counted_downwards():
    book = registry()
    assert greet(book, "evaluator", "e", "evaluator") == (-1, 1)
    assert greet(book, "head", "h", "supervisor") == (-2, 1)
    assert greet(book, "evaluator", "f", "evaluator") == (-1, 2)


def test_the_same_life_keeps_its_incarnation():
    book = registry()
    assert greet(book, "actor/0", "a") == greet(book, "actor/0", "a") == (0, 1)
    assert book.record_heartbeat(0, 1, 7, 3) == "current"
    member, = book.members()
    assert (member.steps, member.version, member.name) == (7, 3, "actor/0")


def test_who_was_replaced_is_superseded_and_a_stranger_unknown():
    book = registry()
    greet(book, "actor/0", "a")
    greet(book, "actor/0", "b")
    assert book.record_heartbeat(0, 1, 0, 0) == "superseded"
    assert book.record_heartbeat(0, 9, 0, 0) == book.record_heartbeat(7, 1, 0, 0) == "unknown"


def test_messages_of_a_former_life_still_count_once():
    book = registry()
    greet(book, "actor/0", "a")
    greet(book, "actor/0", "b")
    assert (
        book.accept_sequence(0, 2, 1)
        and book.accept_sequence(0, 1, 5)
        and not book.accept_sequence(0, 1, 5)
        and not book.accept_sequence(0, 1, 4)
    )
    assert not book.accept_sequence(0, 2, 1) and book.accept_sequence(0, 2, 3)
    assert not book.accept_sequence(3, 1, 1), "no member has this index"


def test_a_session_keeps_its_count_wherever_it_sits():
    book = registry(actors=0, live_s=0.0)
    greet(book, "a/0", "a")
    assert book.accept_sequence(0, 1, 5)
    greet(book, "b/0", "b")
    book.live_s = 30.0
    assert greet(book, "a/0", "a") == (1, 1)
    assert not book.accept_sequence(1, 1, 5) and book.accept_sequence(1, 1, 6)


def test_the_state_survives_json():
    book = registry()
    greet(book, "actor/1", "a")
    greet(book, "far/0", "b")
    book.accept_sequence(1, 1, 4)
    again = registry()
    again.load_state_dict(json.loads(json.dumps(book.state_dict())))
    assert again.members() == () and again.record_heartbeat(1, 1, 0, 0) == "unknown"
    assert (
        greet(again, "actor/1", "a") == (1, 1) and not again.accept_sequence(1, 1, 4) and again.accept_sequence(1, 1, 5)
    )
    assert greet(again, "far/0", "c") == (2, 2)


def test_what_a_place_has_learnt_is_told_to_its_next_life_and_kept_in_checkpoints():
    book, other = registry(), registry()
    place, _ = greet(book, "actor/1", "first")
    assert book.member_state(place) == b""
    book.set_member_state(place, b"old")
    book.set_member_state(place, b"new")
    other.load_state_dict(state_tree.unpack(*state_tree.pack(book.state_dict())))
    assert other.member_state(place) == b"new" and other.member_state(0) == b""
    other.load_state_dict({"lives": [], "stored": {}})  # as former versions saved it
    assert other.member_state(place) == b""


def test_a_thousand_lives_leave_a_short_list():
    book = registry()
    for life in range(1000):
        _, incarnation = greet(book, "actor/0", f"s{life}")
        assert book.accept_sequence(0, incarnation, 1)
    assert incarnation == 1000
    assert len(book.state_dict()["lives"]) == len(book.state_dict()["stored"]) == MAX_PAST_INCARNATIONS + 1


def test_nobody_crowds_others_out_of_the_inbox():
    inbox = Inbox(2)
    first, second = ExchangeRequest(index=0, sequence=1), ExchangeRequest(index=1, sequence=1)
    assert inbox.peek() is None and inbox.pop() is None
    assert inbox.offer(first) and inbox.offer(first) and not inbox.offer(first) and inbox.offer(second)
    assert not inbox.room(0) and inbox.room(1) and len(inbox) == 3
    assert inbox.peek() is first and inbox.pop() is first and inbox.room(0)
    assert inbox.pop() is first and inbox.pop() is second and inbox.pop() is None


def test_steps_that_wait_in_the_inbox_are_bounded():
    inbox = Inbox(10, steps=5)
    few, many = ExchangeRequest(index=0, steps=4), ExchangeRequest(index=0, steps=100)
    assert inbox.offer(few) and inbox.offer(many) and not inbox.room(0) and not inbox.offer(few) and inbox.room(1)
    assert inbox.pop() is few and not inbox.room(0) and inbox.pop() is many and inbox.room(0)


def sealed(fill) -> ExchangeRequest:
    outbox = Outbox()
    fill(outbox)
    return ExchangeRequest.FromString(outbox.take_message().SerializeToString())


def packed(chunk: Chunk) -> bytes:
    return Codec(LAYOUT).pack(chunk).to_bytes()


def test_everything_arrives_as_it_was_said():
    priority = np.arange(8, dtype=np.float32)

    def fill(outbox):
        outbox.count_steps(3)
        outbox.count_steps(4)
        outbox.add_chunk(packed(some_chunk(1)), priority.tobytes())
        outbox.add_chunk(packed(some_chunk(2)), b"")
        outbox.episode(Episode(-2.5, 11, 3, info={"cost:sum": 4.0}))
        outbox.write({"actor/policy_lag": 2.0})
        outbox.write({"actor/policy_lag": 4.0})
        outbox.count("fault/env_rebuilds", 2)
        outbox.add_time("wire/wait_ms", 0.0017)
        outbox.add_evaluation(Score([1.0, 2.0], [3, 4], 9, info={"cost:sum": 0.5}), weights(9))
        outbox.set_member_state(b"known")

    delivery = decode_message(sealed(fill), LAYOUT)
    assert delivery.steps == 7 and delivery.member_state == b"known"
    assert delivery.episodes == [Episode(-2.5, 11, 3, actor=0, info={"cost:sum": 4.0})]
    assert delivery.metrics == {"actor/policy_lag": (6.0, 2)}
    assert delivery.counters == {"fault/env_rebuilds": 2, "wire/wait_ms": 1}
    for seed, (chunk, found) in enumerate(delivery.chunks, 1):
        again = Codec(LAYOUT).unpack(chunk)
        for name, values in some_chunk(seed).columns.items():
            np.testing.assert_array_equal(again.columns[name], values)
        assert found is None if seed == 2 else (found == priority).all()
    (score, state), = delivery.evaluations
    assert score == Score([1.0, 2.0], [3, 4], 9, info={"cost:sum": 0.5})
    assert all((state[name] == value).all() for name, value in weights(9).items())


def test_a_message_holds_one_judgement_and_the_next_the_next():
    outbox = Outbox()
    outbox.add_evaluation(Score([1.0], [1], 1), weights(1))
    outbox.add_evaluation(Score([1.0], [1], 2), weights(2))
    assert [j.version for j in outbox.take_message().judgements] == [1] and not outbox.empty
    assert [j.version for j in outbox.take_message().judgements] == [2] and outbox.empty


def spoil(name, value):
    chunk = some_chunk()
    columns = {key: column.copy() for key, column in chunk.columns.items()}
    columns[name].reshape(-1)[0] = value
    return Chunk(columns, chunk.valid)


@pytest.mark.parametrize(("fill", "words"), [
    (lambda box: box.add_chunk(b"garbage", b""), "too few"),
    (lambda box: box.add_chunk(packed(some_chunk())[:-1], b""), "checksum"),
    (lambda box: box.add_chunk(packed(spoil("reward", np.nan)), b""), "reward .* not finite"),
    (lambda box: box.add_chunk(packed(spoil("obs.vector", np.inf)), b""), "obs.vector .* not finite"),
    (lambda box: box.add_chunk(packed(spoil("action", 4)), b""), "outside 0 to 3"),
    (lambda box: box.add_chunk(packed(spoil("action", -1)), b""), "actions -1"),
    (lambda box: box.add_chunk(packed(some_chunk()), b"123"), "3 bytes of priorities"),
    (lambda box: box.episode(Episode(np.nan, 3)), "return nan"),
    (lambda box: box.episode(Episode(0.0, 3, info={"cost": np.inf})), "'cost': inf"),
    (lambda box: box.episode(Episode(0.0, 3, info={"a\nb": 1.0})), "info metric"),
    (lambda box: box.count("a\nb"), "not a tag"),
    (lambda box: box.write({"": 1.0}), "not a tag"),
    (lambda box: box.set_member_state(bytes(1 << 21)), "of member state"),
    (lambda box: box.count_steps(1 << 40), "steps in one message"),
    (lambda box: box.add_evaluation(Score([], [], 1), weights(1)), "0 returns"),
    (lambda box: box.add_evaluation(Score([1.0], [1, 2], 1), weights(1)), "2 lengths"),
    (lambda box: box.add_evaluation(Score([np.inf], [1], 1), weights(1)), "1 returns")])
def test_what_is_unsound_raises_value_error(fill, words):
    with pytest.raises(ValueError, match=words):
        decode_message(sealed(fill), LAYOUT)


@pytest.mark.parametrize(("value", "words"), [(1.5, "actions .* to 1.5 of a chunk, outside -1 to 1"),
                                              (np.nan, "column action of a chunk is not finite"), (1.0, None)])
def test_continuous_actions_are_within_one(value, words):
    layout = Layout(replace(SPEC, num_actions=0, box=Box((2,), (-1.0, -1.0), (3.0, 1.0))), Window(), 4)
    chunker, chunks = Chunker(layout, 1), []
    obs = {"vector": np.zeros((1, 3), "f4"), "wide": np.zeros((1, 80), "f4")}
    zero = np.zeros(1, "f4")
    while not chunks:
        chunks = chunker.append(obs, np.array([[0.5, value]], "f4"), zero, zero, np.zeros(1, bool))
    data = Codec(layout).pack(chunks[0][1]).to_bytes()
    message = sealed(lambda box: box.add_chunk(data, b""))
    if words is None:
        (found, _), = decode_message(message, layout).chunks
        assert found.dense["action"][0].tolist() == [0.5, 1.0]
    else:
        with pytest.raises(ValueError, match=words):
            decode_message(message, layout)


def test_weights_that_are_none_raise_value_error():
    message = sealed(lambda box: box.add_evaluation(Score([1.0], [1], 1), weights(1)))
    for data in (b"", b"\x80\x04pickle", message.judgements[0].weights[:-3]):
        message.judgements[0].weights = data
        with pytest.raises(ValueError, match="not valid safetensors"):
            decode_message(message, LAYOUT)


@given(st.binary(max_size=300))
@settings(deadline=None, max_examples=200)
def test_no_bytes_do_worse_than_value_error(data):
    message = ExchangeRequest()
    message.parcels.add(chunk=data)
    with pytest.raises(ValueError):
        decode_message(message, LAYOUT)
    with pytest.raises(ValueError):
        PackedChunk.from_bytes(data, LAYOUT)


def test_a_process_of_the_run_does_not_inherit_what_a_member_that_joined_left():
    """As after a resume with more actors, whose places members had before."""
    book = Registry(1, 30.0)
    index, incarnation = book.hello("host-0123456789abcdef/0", "actor", "there", 1, "a" * 32, own=False)
    book.set_member_state(index, b"anything")
    book.deregister(index, incarnation)
    assert book.hello("host-fedcba9876543210/0", "actor", "there", 2, "b" * 32, own=False)[0] == index
    assert book.member_state(index) == b"anything"
    assert book.hello(f"actor/{index}", "actor", "here", 3, "c" * 32)[0] == index and book.member_state(index) == b""


def joiner(number):
    return f"host-{number:016x}/0"


def test_learners_that_share_the_members_of_a_run_assign_different_indices():
    """Learner i assigns further indices that are i modulo the number of learners, as the run's own actors have."""
    for actors, shares in ((2, 2), (3, 2), (0, 3), (5, 3)):
        found = []
        for share in range(shares):
            book = Registry(actors, 30.0, share=share, shares=shares)
            indices = [book.hello(joiner(n), "actor", "there", n, f"{n:032x}", own=False)[0] for n in range(3)]
            assert all(index >= actors and index % shares == share for index in indices)
            found += indices
        assert sorted(found)[: shares] == list(range(actors, actors + shares)) and len(set(found)) == 3 * shares


def test_the_registries_of_several_learners_merge_into_one_that_knows_all_members():
    books = [Registry(2, 30.0, share=share, shares=2) for share in range(2)]
    for share, book in enumerate(books):
        book.hello(f"actor/{share}", "actor", "here", share, f"{share}" * 32)
        assert book.accept_sequence(share, 1, 7 + share)
        book.set_member_state(share, bytes([share]))
    merged = Registry(2, 30.0)
    merged.load_state_dict(merge_registries(book.state_dict() for book in books))
    for share in range(2):
        assert not merged.accept_sequence(share, 1, 7 + share), "stored before"
        assert merged.accept_sequence(share, 1, 8 + share) and merged.member_state(share) == bytes([share])
        assert merged.hello(f"actor/{share}", "actor", "here", 9, "f" * 31 + f"{share}") == (share, 2)
    assert merge_registries([]) == {"lives": [], "stored": {}, "memories": {}}


def test_of_a_member_that_several_learners_know_the_newest_state_is_merged():
    """After one learner became two, both know all members; member 1 sent its state to learner 1 since."""
    old, new = np.array([1], np.uint8), np.array([2], np.uint8)
    lives = [["actor/0", 0, 1, "s0", "actor", True], ["actor/1", 1, 1, "s1", "actor", True]]
    first = {"lives": lives, "stored": {"s0": 7, "s1": 3}, "memories": {"0": new, "1": old}}
    second = {"lives": lives, "stored": {"s0": 3, "s1": 9}, "memories": {"0": old, "1": new}}
    merged = merge_registries([first, second])
    assert merged["stored"] == {"s0": 7, "s1": 9} and merged["lives"] == lives
    assert {index: int(state[0]) for index, state in merged["memories"].items()} == {"0": 2, "1": 2}
