"""An environment that is built when it is first reset is the one that was to be built."""

import numpy as np
import pytest

from qfleet import envs
from qfleet.envs import EnvConfig
from qfleet.envs.lazy import LazyEnv

CATCH = EnvConfig(id="toy/Catch-v0", lanes=2)


def test_nothing_is_built_before_the_first_reset():
    built = []

    def build():
        built.append(envs.make(CATCH, 2))
        return built[-1]

    plain = envs.make(CATCH, 2)
    later = LazyEnv(build, plain.spec, 2)
    later.close()
    assert not built and later.faults() == 0 and later.render() is None
    with pytest.raises(RuntimeError, match="before reset"):
        later.send(np.zeros(2, np.int64))
    for env in (plain, later):
        env.reset([3, 4])
        env.send(np.array([0, 1]))
    one, other = plain.recv(), later.recv()
    assert len(built) == 1 and all(np.array_equal(one.obs[name], other.obs[name]) for name in one.obs)
    later.reset([3, 4])
    assert len(built) == 1
    plain.close(), later.close()
