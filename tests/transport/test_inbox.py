"""What arrives is looked at before it is stored: a message of one member never ends the learner."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import torch
from transport_kit import LAYOUT, some_chunk

from qfleet.replay.codec import Blocks, Codec, PackedChunk
from qfleet.replay.config import ReplayConfig
from qfleet.replay.host_store import HostReplay
from qfleet.training.remote_actors import MessageHandler
from qfleet.training.timers import TimeShares
from qfleet.transport.fleet_pb2 import ExchangeRequest, Parcel
from qfleet.transport.inbox import Inbox
from qfleet.transport.registry import Registry


def test_a_chunk_that_does_not_decode_is_refused_and_the_next_one_is_stored(caplog):
    counted = Counter()
    replay = HostReplay(LAYOUT, ReplayConfig(capacity=80, min_steps=0, samples_per_insert=1e9, chunk_steps=8), 1,
                        torch.device("cpu"))
    meter = SimpleNamespace(count=lambda tag, by=1: counted.update({tag: by}), counters={})
    learner = SimpleNamespace(flat=SimpleNamespace(state=dict))
    core = SimpleNamespace(replay=replay, experience=replay, clock=replay.clock, meter=meter, layout=LAYOUT,
                           learner=learner)
    registry, inbox = Registry(1, 30.0), Inbox(4)
    registry.hello("actor/0", "actor", "here", 1, "a")
    good = Codec(LAYOUT).pack(some_chunk())
    data = good.blocked["obs.wide"].data + good.blocked["obs.wide"].data  # twice the rows that are announced
    bad = PackedChunk(good.dense, {"obs.wide": Blocks(data, np.array([len(data)], np.uint32))}, good.valid)
    for sequence, packed in enumerate([bad, good], 1):
        inbox.offer(ExchangeRequest(index=0, incarnation=1, sequence=sequence, steps=8,
                                    parcels=[Parcel(chunk=packed.to_bytes())]))
    assert MessageHandler(core, registry, inbox, TimeShares()).step()
    assert counted == {"fault/bad_messages": 1} and "a chunk of member 0 was dropped" in caplog.text
    replay.clock.count_steps(1)
    assert replay.sample(16) is not None and replay.metrics()["replay/dropped_chunks"] == 1
