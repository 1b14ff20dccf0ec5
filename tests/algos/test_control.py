"""DDPG, D4PG and TD3's fixes: what is learnt against naive loops, what no gradient may reach, how noise is made."""

import itertools
from dataclasses import replace

import pytest
import torch
from control_kit import ALGOS, PICTURES, SPEC, TD3, agent, batch_of, config, twins
from family_kit import OWN_ENCODER, changes_of

from qfleet.algos.actor_critic import next_noise
from qfleet.core.agent import NOISE_COMPONENTS, ExplorationParams, NoiseProcess, first_order_noise
from qfleet.core.env import Box, EnvSpec
from qfleet.core.errors import UserError
from qfleet.explore import pink
from qfleet.learner.learner import Autograd
from qfleet.optim.flat_params import Flat
from qfleet.optim.optimizer import OptimizerConfig
from qfleet.runconfig.resolution import resolve
from qfleet.sync.gradient_sync import Solo


def grads_of(total, net, prefix):
    named = {name: p for name, p in net.named_parameters() if name.startswith(prefix)}
    return dict(zip(named, torch.autograd.grad(total, list(named.values()), allow_unused=True, retain_graph=True),
                    strict=True))


@pytest.mark.parametrize(("algo", "policy", "critic"), [("ddpg", 1e-4, 1e-3), ("d4pg", 1e-4, 1e-4)])
def test_without_settings_the_policy_learns_at_the_papers_part_of_the_critics_rate(algo, policy, critic):
    assert ALGOS[algo].Config().policy_rate == pytest.approx(policy / critic)


@pytest.mark.parametrize("spec", [SPEC, PICTURES], ids=["vector", "pixels"])
@pytest.mark.parametrize("switches", [{}, TD3], ids=["plain", "td3"])
@pytest.mark.parametrize("algo", ALGOS)
def test_the_policy_loss_leaves_the_critics_gradients_untouched(algo, switches, spec):
    made = agent(algo, spec, **switches)
    net, target = twins(made)
    loss = made.loss(net, target, batch_of(2, 8, spec=spec), torch.Generator())
    assert all(grad is None for grad in grads_of(loss.extra, net, "critics.").values())
    assert all(grad is not None and grad.any() for grad in grads_of(loss.extra, net, "policy.").values())
    assert all(grad is None for grad in grads_of(loss.per_item.sum(), net, "policy.").values())
    together = grads_of(loss.per_item.mean() + loss.extra, net, "critics.")
    alone = grads_of(loss.per_item.mean(), net, "critics.")
    assert all(torch.equal(together[name], alone[name]) for name in alone)


@pytest.mark.parametrize("algo", ALGOS)
def test_norms_are_for_critics_and_for_pictures(algo):
    def norms(part):
        return [module for module in part.modules() if isinstance(module, torch.nn.LayerNorm | torch.nn.GroupNorm)]

    vectors = agent(algo, norm="layer", twin=True, hidden=(8, 8)).network()
    assert not norms(vectors.policy) and [len(norms(critic)) for critic in vectors.critics] == [2, 2]
    pictures = agent(algo, PICTURES, norm="layer", hidden=(8, 8)).network()
    assert norms(pictures.policy.encoder) and not norms(pictures.policy.head)


def test_the_policy_climbs_its_critic():
    """The deterministic policy gradient of Silver et al. 2014: ∇θ μ · ∇a Q, item by item."""
    made = agent("ddpg")
    net, target = twins(made)
    batch = batch_of(2)
    found = grads_of(made.loss(net, target, batch, torch.Generator()).extra, net, "policy.")
    obs = batch.obs(0)
    action = net.policy(obs).detach().requires_grad_()
    q = net.critics[0].distribution(net.critics[0].features(obs), action).sum()
    slope, = torch.autograd.grad(q, action)
    mu = net.policy(obs)
    expected = torch.autograd.grad(-(mu * slope).sum(1).mean(), list(net.policy.parameters()))
    for one, other in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("twin", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@torch.no_grad()
def test_ddpg_by_a_naive_loop(twin, n):
    made = agent("ddpg", twin=twin, n_step=n, gamma=0.9)
    net, target = twins(made)
    batch = batch_of(n + 1)
    loss = made.loss(net, target, batch, torch.Generator())
    rows = batch.rows
    for i in range(len(batch.keys)):
        ret, scale, t = 0.0, 1.0, 0
        while t < n and not rows["last"][i, t]:
            ret += scale * float(rows["reward"][i, t])
            scale *= 0.9 * float(rows["discount"][i, t])
            t += 1
        there = {"obs": rows["obs.obs"][i:i + 1, t]}
        values = [float(c.distribution(c.features(there), target.policy(there))) for c in target.critics]
        y = ret + scale * min(values)
        here = {"obs": rows["obs.obs"][i:i + 1, 0]}
        q = [float(c.distribution(c.features(here), rows["action"][i:i + 1, 0].flatten(1))) for c in net.critics]
        assert float(loss.per_item[i]) == pytest.approx(sum((y - each) ** 2 for each in q), rel=1e-4, abs=1e-5)
        assert float(loss.priority[i]) == pytest.approx(sum(abs(y - each) for each in q) / len(q), rel=1e-3, abs=1e-5)


def test_of_two_laws_the_one_with_the_lower_mean_is_learnt_from():
    made = agent("d4pg", twin=True, gamma=1.0)
    net, target = twins(made)
    batch = batch_of(2, 6)
    batch.rows["reward"].zero_()
    batch.rows["discount"].fill_(1)
    batch.rows["last"].fill_(False)
    with torch.no_grad():  # both critics are certain: one of −1, the other of 2
        for critic, atom in zip(target.critics, (2, 5), strict=True):
            critic.head.q.weight.zero_()
            critic.head.q.bias.copy_(30.0 * torch.nn.functional.one_hot(torch.tensor(atom), 7))
    support = torch.linspace(-3, 4, 7)
    loss = made.loss(net, target, batch, torch.Generator())
    obs, action = batch.obs(0), batch.rows["action"][:, 0].flatten(1)
    expected = sum(-c.distribution(c.features(obs), action).log_softmax(1)[:, 2] for c in net.critics)
    assert float(support[2]) < 0
    torch.testing.assert_close(loss.per_item, expected, rtol=1e-4, atol=1e-4)


def test_smoothing_is_clipped_and_keeps_within_bounds():
    made = agent("ddpg", smoothing=50.0, smoothing_clip=0.25)
    net, target = twins(made)
    asked = []
    critic = target.critics[0]
    law = critic.distribution
    critic.distribution = lambda features, action: asked.append(action) or law(features, action)
    batch = batch_of(2, 64)
    made.loss(net, target, batch, torch.Generator().manual_seed(0))
    obs = batch.obs(1 - batch.rows["last"][:, 0].long())
    off = asked[0] - target.policy(obs)
    assert off.abs().max() <= 0.2501 and (off.abs() > 0.24).float().mean() > 0.9 and asked[0].abs().max() <= 1


NUMBERS = {"gamma": 0.5, "n_step": 2, "policy_rate": 0.5, "policy_delay": 3, "smoothing": 0.5, "smoothing_clip": 0.01,
           "torso_width": 2, "torso_pool": 2, "hidden": (4, 4), "atoms": 9, "v_min": -7.0, "v_max": 9.0,
           **OWN_ENCODER, "encoder_kwargs": {"scale": 0.5}}
CONTEXT = {"smoothing_clip": {"smoothing": 0.5}, "torso_width": {"torso": "impala"}, "torso_pool": {"torso": "impala"},
           "spectral_norm": {"torso": "impala"}, "encoder_kwargs": OWN_ENCODER}
"""Where an option is idle by itself."""


def changes(algo):
    """What both have is changed in one of them."""
    return changes_of(config(algo), NUMBERS, {"algo"} if algo == "ddpg" else set(ALGOS["ddpg"].Config.model_fields))


def weights_after(algo, spec, updates=2, **switches):
    """The weights, laid flat, after some updates."""
    cfg = config(algo, **switches)
    made = ALGOS[algo].build(cfg, spec)
    torch.manual_seed(3)
    flat, target = Flat(made.network(), groups=made.param_groups), Flat(made.network().requires_grad_(False))
    derive = Autograd(made, flat.net, target.net, torch.Generator().manual_seed(0))
    solo = Solo(OptimizerConfig(learning_rate=1e-2))
    solo.attach(flat)
    for seed in range(updates):
        found = derive(batch_of(cfg.n_step + 1, 8, seed, spec))
        solo.apply(found.grads)
        flat.set_buffers(found.buffers)
        target.polyak_update(flat, 0.1)
    return flat.master


@pytest.mark.parametrize(("algo", "name", "value"), [(a, n, v) for a in ALGOS for n, v in changes(a)])
def test_every_option_changes_the_update_or_is_refused(algo, name, value):
    pictures = name in ("torso", "torso_width", "torso_pool", "spectral_norm") or value == "group"
    spec, context = PICTURES if pictures else SPEC, CONTEXT.get(name, {})
    assert not context or name in config(algo).inactive(), "without its context it must be refused"
    assert name not in config(algo, **context).inactive()
    before = weights_after(algo, spec, **context)
    after = weights_after(algo, spec, **context, **{name: value})
    assert before.shape != after.shape or not torch.equal(before, after)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("twin", [False, True])
@pytest.mark.parametrize("algo", ALGOS)
@torch.no_grad()
def test_actors_find_the_priority_that_the_learner_would(algo, twin, n):
    """With one network in both places and nothing drawn, to the last digits; for every row as it was seen."""
    made = agent(algo, twin=twin, n_step=n, gamma=0.9)
    net, _ = twins(made)
    batch = batch_of(n + 1, 12)
    rows = dict(batch.rows)
    hints = [made.evaluate_actions(net, batch.obs(t), rows["action"][:, t]) for t in range(n + 1)]
    rows |= {name: torch.stack([row[name] for row in hints], 1) for name in made.priority_inputs}
    assert all(rows[name].shape == (12, n + 1, *shape) for name, (shape, _) in made.priority_inputs.items())
    found = made.priority({name: rows[name] for name in rows if not name.startswith("obs.")})
    expected = made.loss(net, net, batch, torch.Generator()).priority
    assert expected.max() > 2 * expected.min()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def play(made, arm, steps, rng=None, over=None):
    """Actions [steps, lanes, A] of a network whose own are 0; episodes of `over` lanes have one step."""
    net, lanes = made.network(), len(arm.epsilon)
    for parameter in net.policy.parameters():
        parameter.zero_()
    rng = rng or torch.Generator().manual_seed(0)
    memory, found = made.recurrent_state.initial(lanes, torch.device("cpu")), []
    for _ in range(steps):
        decision = made.act(net, {"obs": torch.zeros(lanes, 3)}, memory, arm, rng)
        assert decision.action.shape == (lanes, 2, 1) and decision.action.abs().max() <= 1
        found.append(decision.action.flatten(1))
        memory = decision.memory if over is None else made.recurrent_state.reset(decision.memory, over)
    return torch.stack(found)


def test_noise_has_the_size_of_its_lane_and_no_mean():
    sigma = torch.tensor([0.0, 0.05, 0.1, 0.2])
    seen = play(agent("ddpg"), ExplorationParams(torch.zeros(2000), sigma=sigma.repeat(500)), 5).unflatten(1, (500, 4))
    torch.testing.assert_close(seen.std((0, 1, 3)), sigma, rtol=0.05, atol=1e-6)
    assert seen.mean((0, 1, 3)).abs().max() < 0.02
    assert abs((seen[1:, :, 3] * seen[:-1, :, 3]).mean() / 0.04) < 0.1, "white"


def test_the_ou_process_remembers_and_begins_anew_with_every_episode():
    theta, params = 0.15, ExplorationParams(torch.zeros(1000), sigma=torch.full((1000,), 0.05),
                                   process=first_order_noise(0.15))
    over = torch.arange(1000) < 500
    seen = play(agent("ddpg"), params, 40, over=over)
    size = 0.05 / (1 - (1 - theta) ** 2) ** 0.5
    late = seen[30:, 500:]
    assert float(late.std()) == pytest.approx(size, rel=0.1)
    assert float((late[1:] * late[:-1]).mean() / late.var()) == pytest.approx(1 - theta, abs=0.05)
    assert float(seen[:, :500].std()) == pytest.approx(0.05, rel=0.05)


def pink_params(lanes, sigma=0.05):
    return ExplorationParams(torch.zeros(lanes), sigma=torch.full((lanes,), sigma), process=pink.pink_noise())


def test_pink_noise_has_its_standard_deviation_from_the_first_step_of_every_episode():
    over = torch.arange(3000) < 1500
    seen = play(agent("ddpg"), pink_params(3000), 60, over=over)
    torch.testing.assert_close(seen.std((1, 2)), torch.full((60,), 0.05), rtol=0.05, atol=0)
    correlation = (seen[1:] * seen[:-1]).mean((0, 2)) / 0.05**2
    assert abs(float(correlation[:1500].mean())) < 0.02, "episodes of one step have independent noise"
    decay = torch.exp(-1 / torch.tensor(pink.TIME_CONSTANTS))
    assert float(correlation[1500:].mean()) == pytest.approx(float(decay.mean()), abs=0.02)


def test_the_power_of_pink_noise_falls_as_one_over_the_frequency():
    seen = play(agent("ddpg"), pink_params(64, 0.02), 4096)
    power = torch.fft.rfft(seen.flatten(1), dim=0).abs().square().mean(1)
    octaves = [float(power[2**k: 2**(k + 1)].mean().log2()) for k in range(3, 10)]  # 1/512 to 1/4 per step
    falls = [one - other for one, other in itertools.pairwise(octaves)]
    assert sum(falls) / len(falls) == pytest.approx(1, abs=0.1) and min(falls) > 0.7 and max(falls) < 1.3


def test_lanes_and_actions_have_independent_pink_noise():
    seen = play(agent("ddpg"), pink_params(4), 3000).flatten(1)
    others = torch.corrcoef(torch.diff(seen, dim=0).T)[~torch.eye(8, dtype=torch.bool)]
    assert others.abs().max() < 0.1


@pytest.mark.parametrize("process", [first_order_noise(1.0), first_order_noise(0.15), pink.pink_noise()],
                         ids=["white", "ou", "pink"])
def test_noise_follows_its_formula_component_by_component(process):
    """By a loop over lanes, actions and components; lanes in which an episode begins have the gain of the start."""
    sigma, kept = torch.tensor([0.1, 0.0, 0.3]), len(process.decay)
    before = torch.zeros(3, 2, NOISE_COMPONENTS)
    before[1:, :, :kept] = torch.randn(2, 2, kept, generator=torch.Generator().manual_seed(1))
    found = next_noise(before, sigma, process, torch.Generator().manual_seed(2))
    drawn = torch.randn(3, 2, kept, generator=torch.Generator().manual_seed(2))
    for lane, action, k in itertools.product(range(3), range(2), range(kept)):
        gain = process.start[k] if lane == 0 else process.gain[k]
        expected = process.decay[k] * before[lane, action, k] + gain * sigma[lane] * drawn[lane, action, k]
        assert float(found[lane, action, k]) == pytest.approx(float(expected), abs=1e-6)
    assert not found[..., kept:].any()


def test_a_noise_process_has_no_more_components_than_the_state():
    with pytest.raises(ValueError, match="1 to 5 components, not 6"):
        NoiseProcess(*torch.ones(3, NOISE_COMPONENTS + 1))


def test_epsilon_is_the_chance_of_any_action():
    seen = play(agent("ddpg"), ExplorationParams(torch.tensor([0.0, 0.5, 1.0, 1.0]).repeat(300)), 5).unflatten(
        1, (300, 4)
    )
    half = (seen[:, :, 1] == 0).all(2).float().mean()
    assert not seen[:, :, 0].any() and float(half) == pytest.approx(0.5, abs=0.06)
    assert float(seen[:, :, 2:].std()) == pytest.approx(3 ** -0.5, rel=0.05) and seen.min() < -0.98


def test_greedy_play_draws_nothing():
    rng = torch.Generator().manual_seed(5)
    before = rng.get_state()
    play(agent("d4pg"), ExplorationParams(torch.zeros(4), network_noise=False), 3, rng=rng)
    assert torch.equal(rng.get_state(), before)


def test_a_fresh_policy_is_far_from_its_bounds():
    net = agent("ddpg", hidden=(256, 256)).network()
    assert net.policy({"obs": 10 * torch.randn(100, 3)}).abs().max() < 0.5


@pytest.mark.parametrize(("words", "why"), [
    (["agent.smoothing_clip=0.1"], "agent.smoothing_clip: has no effect without agent.smoothing"),
    (["agent.torso_width=2"], "agent.torso_width: has no effect unless agent.torso=impala"),
    (["agent.algo=d4pg", "agent.v_min=10", "agent.v_max=1"], "agent.v_min=10 is not below agent.v_max=1"),
    (["agent.algo=dqn"], "has continuous actions"),
    (["explore.kind=ez_greedy"], "explore.kind=ez_greedy is for discrete actions"),
    (["agent.algo=c51", "explore.kind=ou"], "explore.kind=ou adds noise to continuous actions"),
    (["agent.algo=c51", "explore.kind=pink"], "explore.kind=pink adds noise to continuous actions")])
def test_what_would_be_ignored_is_refused(words, why):
    with pytest.raises(UserError) as error:
        resolve("pendulum", words)
    assert why in str(error.value)


@pytest.mark.parametrize(("spec", "switches", "why"), [
    (SPEC, {"torso": "impala"}, "is for images"),
    (EnvSpec("toy", SPEC.observation, 4), {}, "4 actions, and this agent needs continuous ones")])
def test_agents_refuse_what_they_cannot_use(spec, switches, why):
    with pytest.raises(UserError, match=why):
        agent("ddpg", spec, **switches)


@pytest.mark.parametrize("algo", ALGOS)
def test_an_action_may_be_one_number_without_a_shape(algo):
    spec = replace(SPEC, box=Box((), (-1.0,), (3.0,)))
    built = agent(algo, spec)
    net, target = built.network(), built.network()
    loss = built.loss(net, target, batch_of(2, spec=spec), torch.Generator().manual_seed(0))
    assert loss.per_item.shape == (16,) and bool(loss.extra.isfinite())
    assert built.act(net, {"obs": torch.zeros(5, 3)}, built.recurrent_state.initial(5, torch.device("cpu")),
                     ExplorationParams(torch.zeros(5)), torch.Generator()).action.shape == (5,)
