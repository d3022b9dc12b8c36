"""Agents of the desks train with one thread, whatever the process has, since another number ends with other weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tailguard.envs import BandHedging, MarketMaking, OptimalExecution
from tailguard.experiments.execution import train_seller
from tailguard.experiments.hedging import train_hedger
from tailguard.experiments.making import train_maker


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2  # the process keeps what it had
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("kind", "settings", "train"),
    [
        (BandHedging, {"dates": 4}, train_hedger),
        (OptimalExecution, {"steps": 4, "risk_aversion": 0.0}, train_seller),
        (MarketMaking, {"steps": 4, "horizon": 0.02}, train_maker),
    ],
)
def test_training_has_one_thread(kind: type[Any], settings: dict[str, Any], train: Callable[..., Any]) -> None:
    seen: set[int] = set()

    class Watched(kind):  # type: ignore[misc]
        def step(self, actions: Any) -> Any:
            seen.add(torch.get_num_threads())
            return super().step(actions)

    train(Watched(16, **settings), steps=64, seed=0)
    assert seen == {1}
