"""Schedules of exploration by hand-computed points."""

import pytest
import torch

from qfleet.core.agent import WHITE_NOISE, ExplorationParams, epsilon_greedy
from qfleet.core.errors import UserError
from qfleet.envs import atari
from qfleet.explore import constant, exponential, ez_greedy, gaussian, ladder, linear, ou, pink
from qfleet.runconfig.resolution import resolve
from qfleet.runs.checkpoint_parts import pack_state, unpack_state


def test_linear_falls_and_stays():
    explorer = linear.build(linear.Config(start=1.0, end=0.1, steps=100), 3, 0, 3)
    assert explorer.params(0).epsilon.tolist() == [1.0] * 3
    assert explorer.params(50).epsilon.tolist() == pytest.approx([0.55] * 3)
    assert explorer.params(2**40).epsilon.tolist() == pytest.approx([0.1] * 3)


def test_exponential_falls_as_if_a_part_of_the_distance_were_taken_off_at_every_step():
    """As Clark et al. write it: ε −= (ε − end) / steps."""
    explorer, epsilon = exponential.build(exponential.Config(end=0.1, steps=1000, until_steps=5000), 3, 0, 3), 1.0
    for step in range(5000):
        if step % 500 == 0:
            assert explorer.params(step).epsilon.tolist() == pytest.approx([epsilon] * 3, rel=2e-3)
        epsilon -= (epsilon - 0.1) / 1000
    assert explorer.params(4999).epsilon.min() > 0.1 and explorer.params(5000).epsilon.tolist() == [0.0] * 3
    assert exponential.build(exponential.Config(), 1, 0, 1).params(2**40).epsilon.item() == pytest.approx(0.01)


def test_beyond_the_rainbow_explores_evaluates_and_plays_as_its_authors_code_does():
    cfg = resolve("btr").config
    explorer = exponential.build(cfg.explore, 1, 0, 1)
    wanted = {0: 1.0, 2_000_000: 0.374, 10_000_000: 0.0167, cfg.total_steps // 2 - 1: 0.01, cfg.total_steps // 2: 0.0}
    assert {step: explorer.params(step).epsilon.item() for step in wanted} == pytest.approx(wanted, abs=1e-3)
    assert cfg.eval.epsilon == 0.01
    rules = atari.rules_of(cfg.env)
    assert (rules.sticky, rules.life_loss, rules.full_action_space, rules.noop_max) == (0.25, False, False, 30)


def test_ladder_is_the_papers():
    explorer = ladder.build(ladder.Config(), 8, 0, 8)
    assert torch.allclose(explorer.params(0).epsilon, torch.tensor([0.4 ** (1 + 7 * i / 7) for i in range(8)]))


def test_ladder_spans_all_lanes_of_the_run():
    parts = [ladder.build(ladder.Config(), 4, first, 8).params(0).epsilon for first in (0, 4)]
    assert torch.equal(torch.cat(parts), ladder.build(ladder.Config(), 8, 0, 8).params(0).epsilon)
    assert torch.equal(ladder.build(ladder.Config(), 4, 8, 8).params(0).epsilon, parts[0])


def test_ladder_comes_down_from_random_play():
    explorer = ladder.build(ladder.Config(warmup_steps=100), 2, 0, 2)
    assert explorer.params(0).epsilon.tolist() == [1.0, 1.0]
    assert explorer.params(50).epsilon[0].item() == pytest.approx(0.7)
    assert explorer.params(100).epsilon[0].item() == pytest.approx(0.4)


def test_one_lane_has_the_first_rung():
    assert ladder.build(ladder.Config(), 1, 0, 1).params(0).epsilon.tolist() == pytest.approx([0.4])


def test_constant():
    assert constant.build(constant.Config(epsilon=0.25), 2, 0, 2).params(7).epsilon.tolist() == [0.25, 0.25]


@pytest.mark.parametrize("module", [gaussian, ou, pink])
def test_noise_has_a_size_for_every_lane_of_the_run(module):
    cfg = module.Config(sigma=0.1, sigma_last=0.4, warmup_steps=100)
    whole = module.build(cfg, 4, 0, 4).params(100)
    assert whole.sigma.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    parts = [module.build(cfg, 2, first, 4).params(100).sigma for first in (0, 2)]
    assert torch.equal(torch.cat(parts), whole.sigma)
    assert module.build(module.Config(sigma=0.3), 2, 0, 2).params(0).sigma.tolist() == pytest.approx([0.3] * 2)


def test_warm_up_is_random_and_what_follows_is_not():
    explorer = gaussian.build(gaussian.Config(warmup_steps=100), 2, 0, 2)
    assert explorer.params(99).epsilon.tolist() == [1, 1] and explorer.params(100).epsilon.tolist() == [0, 0]


def test_decays_are_those_of_the_strategies():
    assert gaussian.build(gaussian.Config(), 1, 0, 1).params(0).process is WHITE_NOISE
    assert WHITE_NOISE.decay.tolist() == [0] and WHITE_NOISE.gain.tolist() == [1]
    assert ou.build(ou.Config(theta=0.15), 1, 0, 1).params(0).process.decay.tolist() == pytest.approx([0.85])


def test_pink_noise_is_larger_during_warm_up_and_has_no_uniform_actions():
    cfg = pink.Config(sigma=0.1, sigma_last=0.3, warmup_steps=100)
    explorer = pink.build(cfg, 2, 0, 2)
    before, after = explorer.params(99), explorer.params(100)
    assert before.sigma.tolist() == [1, 1] and after.sigma.tolist() == pytest.approx([0.1, 0.3])
    assert not before.epsilon.any() and not after.epsilon.any() and before.process is after.process


def repetitions(explorer, steps, at=0):
    """Of lane 0: for each run of random steps, the choice and how often it was taken in a row."""
    found, previous = [], None
    for _ in range(steps):
        params = explorer.params(at)
        choice = params.choice[0].item() if params.epsilon[0] else None
        if choice is not None:
            if choice == previous:
                found[-1][1] += 1
            else:
                found.append([choice, 1])
        previous = choice
    return found


def test_ez_greedy_repeats_random_actions_by_a_power_law():
    explorer = ez_greedy.build(ez_greedy.Config(mu=2.0, max_repeats=4), 1, 0, 1)
    lengths = [length for _, length in repetitions(explorer, 60_000)]
    wanted = [n**-2.0 for n in (1, 2, 3, 4)]
    shares = [lengths.count(n) / len(lengths) for n in (1, 2, 3, 4)]
    assert max(lengths) == 4
    assert shares == pytest.approx([w / sum(wanted) for w in wanted], abs=0.01)


@pytest.mark.parametrize("epsilon", [0.05, 0.5])
def test_epsilon_of_ez_greedy_is_the_share_of_random_steps(epsilon):
    explorer = ez_greedy.build(ez_greedy.Config(start=epsilon, end=epsilon), 500, 0, 500)
    shares = [explorer.params(0).epsilon.mean().item() for _ in range(600)]
    assert sum(shares[200:]) / 400 == pytest.approx(epsilon, rel=0.04)  # the first steps have begun no repetition yet


def test_ez_greedy_explores_at_the_start_and_hardly_at_the_end():
    explorer = ez_greedy.build(ez_greedy.Config(end=0.0, steps=100), 3, 0, 3)
    assert explorer.params(0).epsilon.tolist() == [1.0] * 3
    for lane in range(3):
        explorer.end_episode(lane, 1.0)
    assert explorer.params(100).epsilon.tolist() == [0.0] * 3


def test_an_action_is_not_repeated_into_the_next_episode():
    cfg = ez_greedy.Config(mu=0.01, max_repeats=50)
    explorer, choices = ez_greedy.build(cfg, 2, 0, 2), []
    for _ in range(40):
        choices.append(explorer.params(0).choice.tolist())
        explorer.end_episode(0, None)
    assert len({own for own, _ in choices}) == 40, "lane 0 ends an episode after every step"
    assert len({other for _, other in choices}) < 8, "lane 1 does not"


def test_ez_greedy_continues_from_a_checkpoint():
    whole, parts = (ez_greedy.build(ez_greedy.Config(start=0.5, end=0.5), 4, 0, 4) for _ in range(2))
    whole.seed(3)
    for _ in range(25):
        whole.params(0)
    parts.load_state_dict(unpack_state(pack_state(whole.state_dict())))
    for _ in range(25):
        mine, its = whole.params(0), parts.params(0)
        assert torch.equal(mine.epsilon, its.epsilon) and torch.equal(mine.choice, its.choice)


def test_a_choice_selects_the_random_action_and_only_that():
    q_NA = torch.tensor([[1.0, 0, 0], [1, 0, 0], [1, 0, 0], [1, 0, 0], [1, 0, 0]])
    params = ExplorationParams(torch.tensor([1.0, 1, 1, 1, 0]), choice=torch.tensor([0.0, 0.4, 0.99, 1.0, 0.99]))
    assert epsilon_greedy(q_NA, params, torch.Generator()).tolist() == [0, 1, 2, 2, 0]


def test_learned_noise_is_combined_with_ez_greedy_only_on_request():
    words = ["explore.kind=ez_greedy", "explore.start=0", "agent.noisy=true"]
    with pytest.raises(UserError, match="noisy_epsilon"):
        resolve("cartpole", words)
    assert resolve("cartpole", [*words, "agent.noisy_epsilon=true"]).config.explore.kind == "ez_greedy"
