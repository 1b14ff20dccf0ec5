"""One file for each algorithm, and where those are found that have none."""

ELSEWHERE = {
    "td3": "agent.algo=ddpg with agent.twin, agent.smoothing and agent.policy_delay, as in the recipe control",
    "ddqn": "agent.algo=dqn with agent.double=true",
    "double_dqn": "agent.algo=dqn with agent.double=true",
    "dueling": "agent.algo=dqn with agent.dueling=true",
    "rainbow": "agent.algo=c51 with most other options, as in the recipe rainbow",
    "apex": "agent.algo=dqn with placement=processes, as in the recipe apex",
    "btr": "agent.algo=iqn with most other options, as in the recipe btr",
}
"""Names that people look for, and what they are here."""
