"""Algorithms, one file each, and hints for names that users search for under another name."""

ALIASES = {
    "td3": "agent.algo=ddpg with agent.twin, agent.smoothing and agent.policy_delay, as in the recipe control",
    "ddqn": "agent.algo=dqn with agent.double=true",
    "double_dqn": "agent.algo=dqn with agent.double=true",
    "dueling": "agent.algo=dqn with agent.dueling=true",
    "hl_gauss": "agent.algo=hlgauss",
    "rainbow": "agent.algo=c51 with most other options; rainbow is a recipe: `qfleet train rainbow env.id=...` or "
               "qfleet.train('rainbow', env=...)",
    "apex": "agent.algo=dqn with actor processes (actors=N), as in the recipe apex",
    "btr": "agent.algo=iqn with most other options, as in the recipe btr",
}
"""Common algorithm names -> the settings that give the same algorithm here."""

_CONTINUOUS = "for continuous actions use agent.algo=ddpg, which is TD3 in the recipe control, or agent.algo=d4pg"
_OFF_POLICY = "qfleet learns values off-policy (the DQN family, R2D2, NGU, Agent57, DDPG, TD3, D4PG)"
NOT_IMPLEMENTED = {
    **{name: f"{_OFF_POLICY} and has no {name.upper()}, which learns on-policy"
       for name in ("ppo", "a2c", "a3c", "trpo", "reinforce", "acktr", "grpo")},
    **{name: f"qfleet has no {title}; {_CONTINUOUS}"
       for name, title in {"sac": "SAC", "tqc": "TQC", "crossq": "CrossQ", "redq": "REDQ"}.items()},
    **{name: f"{_OFF_POLICY} from its own environment steps and has no {title}"
       for name, title in {"impala": "IMPALA", "vtrace": "V-trace", "dreamer": "Dreamer", "dreamerv3": "DreamerV3",
                           "muzero": "MuZero", "cql": "CQL", "iql": "IQL", "bc": "behaviour cloning",
                           "qmix": "QMIX"}.items()},
}
"""Common algorithms that are not implemented -> the message to show."""
