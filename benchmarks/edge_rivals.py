"""Rivals for a market with a planted edge: what a careful quant would try first, on the folds that an agent gets.

Each rival learns from the training rows of a fold only, decides at the close of a bar from the agent's features, and
returns target weights for the test rows. `ridge` and `boosting` predict the return from the next open to the one after it
and trade it when it exceeds a threshold: the one that was best, after costs, for predictions of training rows held out in
time. `direct` is a small network from features and last position to the next position, trained by the gradient of the net
Sharpe ratio through the costs.
"""

import numpy as np
import torch
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.linear_model import Ridge
from sklearn.model_selection import KFold

from tailguard.market.planted import best_threshold, oracle_weights

PENALTIES = np.logspace(1.0, 5.0, 9)
BLOCKS = 5


def ridge(features, earned, train, test, fee):
    """Linear regression with the penalty that predicts held-out blocks best."""
    rows = slice(*train)
    errors = []
    for penalty in PENALTIES:
        held_out = _held_out(lambda p=penalty: Ridge(alpha=p), features[rows], earned[rows])
        errors.append(np.square(held_out - earned[rows]).sum())
    penalty = PENALTIES[int(np.argmin(errors))]
    return _threshold_rule(lambda: Ridge(alpha=penalty), features, earned, train, test, fee)


def boosting(features, earned, train, test, fee):
    """Shallow gradient-boosted trees with strong shrinkage."""

    def model():
        return _PerAsset(
            lambda: HistGradientBoostingRegressor(max_iter=80, learning_rate=0.03, max_depth=3, min_samples_leaf=60)
        )

    return _threshold_rule(model, features, earned, train, test, fee)


def direct(features, earned, train, test, fee, *, seed=0, epochs=60, length=256):
    """A small network trained by the gradient of the net Sharpe ratio, stopped where held-out rows are traded best."""
    torch.manual_seed(seed)
    first, last = train
    cut = last - (last - first) // 4
    x, y = torch.as_tensor(features, dtype=torch.float32), torch.as_tensor(earned, dtype=torch.float32)
    assets = y.shape[1]
    network = torch.nn.Sequential(torch.nn.Linear(x.shape[1] + assets, 16), torch.nn.Tanh(), torch.nn.Linear(16, assets))
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3, weight_decay=1e-3)

    def play(rows, start):
        position, positions = start, []
        for t in rows:
            position = torch.tanh(network(torch.cat((x[t], position), dim=-1))) / assets
            positions.append(position)
        return torch.stack(positions)

    def returns(positions, gained, start):
        traded = torch.diff(positions, dim=0, prepend=start.unsqueeze(0)).abs().sum(-1)
        return (positions * gained).sum(-1) - fee * traded

    best, kept = -np.inf, None
    starts = torch.arange(first, max(cut - length, first + 1), length // 2)
    for _ in range(epochs):
        rows = [torch.minimum(starts + k, torch.tensor(cut - 1)) for k in range(min(length, cut - first))]
        nothing = torch.zeros(len(starts), assets)
        gained = torch.stack([y[t] for t in rows])
        net = returns(play(rows, nothing), gained, nothing)
        loss = -net.mean() / (net.std() + 1e-6)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            nothing = torch.zeros(assets)
            held_out = returns(play(range(cut, last), nothing), y[cut:last], nothing)
            score = float(held_out.mean() / (held_out.std() + 1e-6))
        if score > best:
            best, kept = score, {name: value.clone() for name, value in network.state_dict().items()}
    network.load_state_dict(kept)
    with torch.no_grad():
        return play(range(*test), torch.zeros(assets)).double().numpy()


RIVALS = {"ridge": ridge, "boosting": boosting, "direct": direct}


class _PerAsset:
    """A regressor for each column of the target."""

    def __init__(self, build):
        self.build = build

    def fit(self, features, targets):
        self.models = [self.build().fit(features, column) for column in targets.T]
        return self

    def predict(self, features):
        return np.stack([model.predict(features) for model in self.models], axis=1)


def _predictions(model, features):
    return np.asarray(model.predict(features)).reshape(len(features), -1)


def _held_out(build, features, targets):
    """Predictions for every row by a model that has not seen its block."""
    found = np.empty_like(targets)
    for rows, held in KFold(BLOCKS).split(features):
        found[held] = _predictions(build().fit(features[rows], targets[rows]), features[held])
    return found


def _threshold_rule(build, features, earned, train, test, fee):
    rows = slice(*train)
    threshold = best_threshold(_held_out(build, features[rows], earned[rows]), earned[rows], fee)
    predicted = _predictions(build().fit(features[rows], earned[rows]), features[slice(*test)])
    return oracle_weights(predicted, threshold)
