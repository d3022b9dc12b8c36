"""Return distributions: atoms of outputs, their loss on known targets, invariance to rescaling, value clipping."""

import pytest
import torch
from torch import nn

from tailguard.ppo.config import CriticConfig
from tailguard.ppo.critic import (
    CategoricalReturns,
    MeanReturn,
    MonotoneQuantileReturns,
    QuantileReturns,
    build_return_distribution,
    critic_errors,
)
from tailguard.ppo.quantiles import cvar_categorical, tail_levels, uniform_levels

N = 8


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


FAMILIES = {
    "mean": MeanReturn,
    "quantile": lambda: QuantileReturns(uniform_levels(N), 0.0),
    "tail": lambda: QuantileReturns(tail_levels(N, 0.1, 3), 0.0),
    "quantile and mean": lambda: QuantileReturns(tail_levels(N, 0.1, 3), 0.0, 1.0),
    "monotone": lambda: MonotoneQuantileReturns(uniform_levels(N), 0.0),
    "categorical": lambda: CategoricalReturns(41, 5.0),
}
every_family = pytest.mark.parametrize("return_dist", [make() for make in FAMILIES.values()], ids=FAMILIES)


def test_an_ordinary_critic_has_sb3s_loss():
    """Without the half that others have: vf_coef means the same."""
    values, returns = random(50, 1), random(50, 1, seed=1)
    torch.testing.assert_close(MeanReturn().errors(values, returns).mean(), nn.functional.mse_loss(values, returns))


@every_family
def test_masses_sum_to_one(return_dist):
    assert return_dist.masses.sum() == pytest.approx(1.0, abs=1e-6)
    assert (return_dist.masses > 0.0).all()
    assert return_dist.atoms(random(3, 2, return_dist.n_outputs)).shape == (3, 2, len(return_dist.masses))


@every_family
@pytest.mark.parametrize(("ratio", "shift"), [(0.7, 0.3), (1.2, -0.2), (0.8, 0.0)])
def test_rescaling_is_affine_for_every_critic(return_dist, ratio, shift):
    heads, features = [nn.Linear(4, return_dist.n_outputs) for _ in range(2)], random(10, 4)
    before = [return_dist.atoms(head(features)) for head in heads]
    return_dist.rescale(heads, torch.tensor(ratio, dtype=torch.float64), torch.tensor(shift, dtype=torch.float64))
    for head, atoms in zip(heads, before, strict=True):
        torch.testing.assert_close(return_dist.atoms(head(features)), ratio * atoms + shift, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_training_on_a_known_distribution_finds_it(name):
    """A table trained on samples of N(1/2, 1): every family must end at its mean; those with a tail at its CVaR too."""
    return_dist = FAMILIES[name]()
    table = nn.Parameter(torch.zeros(return_dist.n_outputs))
    optimizer = torch.optim.Adam([table], lr=0.05)
    generator = torch.Generator().manual_seed(0)
    m = len(return_dist.masses)
    targets = torch.randn(4000, m, generator=generator) + 0.5  # any sample is an unbiased target
    if name == "mean":
        targets = targets[:, :1]
    for step in range(600):
        optimizer.param_groups[0]["lr"] = 0.05 * (1.0 - step / 600)
        chosen = targets[torch.randint(len(targets), (256,), generator=generator)]
        optimizer.zero_grad()
        return_dist.errors(table.expand(256, -1), chosen).mean().backward()
        optimizer.step()
    atoms = return_dist.atoms(table.detach())
    assert (atoms @ return_dist.masses).item() == pytest.approx(0.5, abs=0.08)
    if name != "mean":
        # Between atoms the quantile function is constant, so a coarse one sees less of the tail than there is.
        assert -1.9 < cvar_categorical(return_dist.masses, atoms, 0.1).item() < -0.7
    if name == "monotone":
        assert (atoms.diff() > 0.0).all()


def test_projection_keeps_mass_and_mean_inside_the_support_and_clamps_outside():
    return_dist = CategoricalReturns(11, 5.0)
    targets = torch.tensor([[-1.3, 0.0, 4.999, 2.25], [-70.0, 70.0, 5.0, -5.0]])
    mass = return_dist.project(targets)
    torch.testing.assert_close(mass.sum(-1), torch.ones(2))
    torch.testing.assert_close((mass @ return_dist.support())[0], targets[0].mean())
    assert mass[1].tolist() == [0.5, *[0.0] * 9, 0.5]
    exact = return_dist.project(torch.tensor([[3.0]]))
    assert exact[0].tolist() == [0.0] * 8 + [1.0, 0.0, 0.0]


def test_the_gradient_of_the_categorical_loss_is_softmax_minus_projection():
    return_dist, outputs, targets = CategoricalReturns(11, 5.0), random(6, 11).requires_grad_(), random(6, 4, seed=1)
    (grad,) = torch.autograd.grad(return_dist.errors(outputs, targets).sum(), outputs)
    torch.testing.assert_close(grad, outputs.softmax(-1) - return_dist.project(targets), atol=1e-6, rtol=1e-5)


def test_the_support_is_laid_out_anew_only_when_returns_have_left_it():
    return_dist = CategoricalReturns(11, 5.0)
    for _ in range(3):
        return_dist.rescale([], torch.tensor(0.9), torch.tensor(0.1))
    assert return_dist.ends.tolist() != [-5.0, 5.0]
    return_dist.rescale([], torch.tensor(1.0), torch.tensor(30.0))
    assert return_dist.ends.tolist() == [-5.0, 5.0]


# Value clipping (R094): each critic against its own old predictions.


def clipped_loss(atoms, old, targets, clip_range=0.5):
    return_dist = build_return_distribution(CriticConfig(num_quantiles=N))
    return critic_errors(clip_range, return_dist, atoms, targets, old), return_dist


def test_clipping_changes_nothing_within_the_range():
    old = random(2, 5, N).sort(-1).values
    atoms, targets = old + 0.1, random(2, 5, N, seed=1)
    clipped, return_dist = clipped_loss(atoms, old, targets)
    torch.testing.assert_close(clipped, return_dist.distance(atoms, targets))


def test_a_critic_beyond_the_range_is_not_drawn_on_but_may_come_back():
    """Targets far above: past the range nothing pulls the mean upwards. Targets far below: the way back is free."""
    old = torch.linspace(-0.1, 0.1, N).expand(2, 3, N)
    for far, flows in ((50.0, False), (-50.0, True)):
        atoms = (old + 2.0).requires_grad_()
        loss, _ = clipped_loss(atoms, old, torch.full((2, 3, N), far))
        (grad,) = torch.autograd.grad(loss.sum(), atoms)
        assert (grad.sum(-1).abs() > 1e-4).all().item() is flows


def test_each_critic_is_clipped_against_its_own_old_predictions():
    """R094: changing what critic 2 said before the update never changes critic 1's loss."""
    atoms, old, targets = random(2, 5, N), random(2, 5, N, seed=1), random(2, 5, N, seed=2)
    other = old.clone()
    other[1] += 3.0
    before, after = (clipped_loss(atoms, x, targets, clip_range=0.1)[0] for x in (old, other))
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])


def test_the_loss_is_the_larger_one_sample_by_sample():
    atoms, old, targets = random(2, 50, N), random(2, 50, N, seed=1), random(2, 50, N, seed=2)
    loss, return_dist = clipped_loss(atoms, old, targets, clip_range=0.3)
    by_hand = old + (atoms - old).clamp(-0.3, 0.3)
    torch.testing.assert_close(
        loss, torch.maximum(return_dist.distance(atoms, targets), return_dist.distance(by_hand, targets))
    )
    assert (loss > return_dist.distance(atoms, targets)).any()


def test_settings_of_earlier_versions_are_understood():
    assert CriticConfig(law="monotone") == CriticConfig(distribution="monotone")
    assert CriticConfig(clip_range=0.2, clip_mode="per_quantile", clip_variance_factor=2.0) == CriticConfig(clip_range=0.2)
    with pytest.raises(ValueError, match="clip_mode"):
        CriticConfig(clip_range=0.2, clip_mode="mean_only")


def test_settings_that_contradict_each_other_are_refused():
    for settings, names in (
        ({"distribution": "categorical", "num_quantiles": 1}, "num_quantiles"),
        ({"distribution": "categorical", "tail_quantiles": 2}, "tail_quantiles"),
        ({"distribution": "categorical", "clip_range": 0.2}, "clip_range"),
    ):
        with pytest.raises(ValueError, match=names):
            CriticConfig(**settings)


@pytest.mark.parametrize("mean_coef", [0.0, 0.1, 1.0])
def test_the_loss_of_the_mean_is_added_to_that_of_the_quantiles(mean_coef):
    levels = tail_levels(N, 0.1, 3)
    atoms, targets = random(5, N), random(5, N, seed=1)
    masses = QuantileReturns(levels, 0.0).masses
    expected = QuantileReturns(levels, 0.0).errors(atoms, targets)
    expected = expected + mean_coef * ((atoms * masses).sum(-1) - (targets * masses).sum(-1)) ** 2
    torch.testing.assert_close(QuantileReturns(levels, 0.0, mean_coef).errors(atoms, targets), expected)
    single = QuantileReturns(levels, 0.0, mean_coef).errors(atoms, targets[:, :1])
    alone = QuantileReturns(levels, 0.0).errors(atoms, targets[:, :1])
    torch.testing.assert_close(single, alone + mean_coef * (atoms @ masses - targets[:, 0]) ** 2)


@pytest.mark.parametrize(("mean_coef", "mean"), [(0.0, 0.0), (1.0, 1.0)])
def test_a_large_return_that_is_rarer_than_the_highest_level_counts_with_the_mean_only(mean_coef, mean):
    """Returns of 50 with probability 2 %, else 0: the mean is 1, and all 16 quantiles are 0."""
    returns = torch.where(torch.arange(1000) < 20, 50.0, 0.0)
    scale = returns.std()
    family = QuantileReturns(uniform_levels(16), 0.0, mean_coef)
    outputs = nn.Parameter(torch.zeros(16))
    optimizer = torch.optim.Adam([outputs], 0.01)
    for step in range(1500):
        optimizer.param_groups[0]["lr"] = 0.01 * (1.0 - step / 1500)
        optimizer.zero_grad()
        family.errors(outputs.expand(1000, 16), (returns / scale).unsqueeze(-1)).mean().backward()
        optimizer.step()
    assert (outputs @ family.masses).item() * scale == pytest.approx(mean, abs=0.15)
    assert outputs[:12].detach().abs().max() < 0.02


@pytest.mark.parametrize("settings", [{"num_quantiles": 1}, {"distribution": "categorical", "tail_quantiles": 0}])
def test_critics_without_quantiles_have_no_mean_beside_them(settings):
    with pytest.raises(ValueError, match="mean_coef"):
        CriticConfig(mean_coef=1.0, **settings)
