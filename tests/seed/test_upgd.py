"""The audit reports' missing test of UPGD together with variance-based gradient scaling (R070)."""

import pytest
import torch
from torch import nn

from tailguard.optim import UPGD, UPGDW, AdaptiveUPGD, VarianceGradientScaler

FACTORS = [1.0, 0.1, 0.01]


def noise_to_signal(cls, factor, adaptive_noise, size):
    """Root mean square of the noise in a step over that of the rest, in steps that the scaler makes shorter by `factor`."""
    moves = []
    for sigma in (0.01, 0.0):
        torch.manual_seed(0)
        param = nn.Parameter(torch.randn(size))
        generator = torch.Generator().manual_seed(0)
        optimizer = cls([param], lr=0.1, weight_decay=0.0, sigma=sigma, adaptive_noise=adaptive_noise, generator=generator)
        # With a huge gain any noise takes the factor to its floor.
        vgs = VarianceGradientScaler([param], warmup_steps=0, alpha=1e12, min_scaling_factor=factor)
        vgs.attach(optimizer)
        for step in range(3):
            before = param.detach().clone()
            param.grad = 1.0 + torch.randn(size)
            assert vgs.scale_gradients() == (factor if step == 2 else 1.0)
            optimizer.step()
            vgs.step()
            if step < 2:  # the factor needs two gradients; only the third step is compared, from equal weights
                with torch.no_grad():
                    param.copy_(before)
        moves.append(param.detach() - before)
    noise = moves[0] - moves[1]
    return (noise.square().mean().sqrt() / moves[1].square().mean().sqrt()).item()


@pytest.mark.parametrize("size", [100, 10_000])
def test_upgd_vgs_noise_to_signal_ratio(size):
    """R070: constant with adaptive noise, 1 / k times as large without, whatever the size of the tensor."""
    adaptive = [noise_to_signal(UPGD, factor, True, size) for factor in FACTORS]
    assert adaptive == pytest.approx([0.01] * 3, rel=0.1 if size > 1000 else 0.3)
    assert adaptive == pytest.approx([adaptive[0]] * 3, rel=0.1)
    fixed = [noise_to_signal(UPGD, factor, False, size) for factor in FACTORS]
    assert [ratio / fixed[0] for ratio in fixed] == pytest.approx([1.0, 10.0, 100.0], rel=0.1)


@pytest.mark.parametrize("cls", [AdaptiveUPGD, UPGDW])
@pytest.mark.parametrize("adaptive_noise", [True, False])
def test_adam_like_upgd_needs_no_care(cls, adaptive_noise):
    """R070: there the whole step is made shorter, the noise with it."""
    ratios = [noise_to_signal(cls, factor, adaptive_noise, 1000) for factor in FACTORS]
    assert ratios == pytest.approx([ratios[0]] * 3, rel=0.1)
    assert 0.005 < ratios[0] < 0.03
