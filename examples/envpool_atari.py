"""Pong on EnvPool, which steps all games together in threads of its own (`pip install envpool`).

    python envpool_atari.py
    qfleet train atari env.id=envpool_atari:pong env.clip_rewards=true env.life_loss=true actors=2
"""

import envpool

import qfleet


def pong(num_envs, seed):
    """The training asks for as many games as it has lanes, and passes a seed, which EnvPool takes only here.

    `stack_num=1`: the replay stores every frame once and stacks four (`env.stack`). Rewards and lives are left as they
    are, so that scores are those of full games.
    """
    return envpool.make_gymnasium(
        "Pong-v5", num_envs=num_envs, seed=seed, stack_num=1, use_fire_reset=False, max_episode_steps=27_000)


if __name__ == "__main__":
    qfleet.train("atari", env={"id": pong, "lanes": 32, "clip_rewards": True, "life_loss": True}, progress=True)
