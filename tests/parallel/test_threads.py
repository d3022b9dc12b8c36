"""The same bits however many threads the environment asks for."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits

from tailguard.parallel.threads import conditions, differences, one_thread, one_thread_in_children, warn_of_differences

# A training in user code, and what a walk-forward, a trader and an evaluation compute; large enough for BLAS to share out.
SCRIPT = """
import hashlib, sys
import torch
from tailguard import DistributionalPPO, TradingVecEnv
from tailguard.config import load_config
from tailguard.experiments.prepared_market import default_split, prepare_market
from tailguard.experiments.trader import Trader
from tailguard.experiments.training import build_model
from tailguard.experiments.walkforward import Pair, Training, WalkforwardRun
from tailguard.evaluate.folds import make_folds
from tailguard.experiments.evaluation import backtest_agent
from tailguard.market import random_walk
from tailguard.parallel.tasks import perform

def show(*arrays):
    print(hashlib.sha256(b"".join(bytes(array) for array in arrays)).hexdigest())

before = torch.get_num_threads()
bars = random_walk(500, seed=0)
env = TradingVecEnv(bars, n_envs=32, episode_length=64, fee=0.001, seed=0)
network = {"lstm_hidden_size": 32, "net_arch": [64, 64]}
model = DistributionalPPO("MlpLstmPolicy", env, n_steps=64, batch_size=512, n_epochs=1, seed=0, policy_kwargs=network)
model.learn(64 * 32)
show(model.flat.tensor.detach().numpy())
config = load_config(None, ["training.n_envs=32", "training.n_steps=64", "training.steps=2048", "selection=null",
  "training.policy=MlpLstmPolicy", "features.drawdown_window=21", "features.slow_window=21", "features.horizons=[1, 5]"])
fold = make_folds(len(bars), 35, 35, config.walkforward.model_copy(update={"folds": 1, "warmup": 16}))[0]
task = Training(Pair(fold, 0), None)
show(perform(task, WalkforwardRun(bars, config, 16, None), lambda share: None).value.decisions)
market = prepare_market(bars, config, default_split(len(bars), config.training))
agent = build_model(market, config.training)
trader = Trader(agent, market.scaler, config.features, config.trading)
show(*(decision.weights for decision in trader.add(bars)))
show(str(backtest_agent(agent, market, 16)).encode())
print(torch.get_num_threads() == before)
"""


def test_equal_bits_with_any_number_of_threads_in_the_environment():
    """Without a variable BLAS takes a thread per core."""
    told = {}
    for threads in (None, "1", "2"):
        environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
        environment |= {"PYTHONPATH": os.pathsep.join(sys.path)} | ({} if threads is None else {"OMP_NUM_THREADS": threads})
        ran = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
        told[threads] = ran.stdout.splitlines()
    assert len(set(map(tuple, told.values()))) == 1
    *hashes, restored = told[None]
    assert len(set(hashes)) == 4
    assert restored == "True"  # the threads of the user's process are what they were


def threads():
    return [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]


def test_threads_are_pinned_for_a_while_and_not_for_good():
    @one_thread()
    def work():
        assert (torch.get_num_threads(), set(threads())) == (1, {1})
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
        raise KeyError

    conditions()  # loads the libraries
    before = torch.get_num_threads()
    with threadpool_limits(2):
        torch.set_num_threads(2)
        for _ in range(2):
            with pytest.raises(KeyError):
                work()
            assert (torch.get_num_threads(), set(threads())) == (2, {2})
    torch.set_num_threads(before)


def test_children_get_one_thread_and_the_environment_is_left_alone(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    with one_thread_in_children():
        assert os.environ["OMP_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == os.environ["OPENBLAS_NUM_THREADS"] == "1"
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert "MKL_NUM_THREADS" not in os.environ


def test_conditions_name_the_cpu_and_the_libraries_that_compute(monkeypatch):
    found = conditions()
    assert found["torch"] == torch.__version__
    assert {"threads", "CPU", "instructions of torch", "numba", "BLAS of numpy", "BLAS of scipy"} <= set(found)
    assert (
        np.show_config(mode="dicts")["Build Dependencies"]["blas"]["version"].split(".")[:3]
        == (found["BLAS of numpy"].split(" ")[0].split(".")[:3])
    )
    monkeypatch.setenv("NUMBA_CPU_NAME", "haswell")
    assert conditions()["CPU"] == "haswell"


def test_what_has_changed_is_named(caplog):
    now = conditions()
    assert differences(now, now) == ""
    assert differences({"torch": "1", "CPU": "a"}, {"torch": "2", "CPU": "a", "new": "x"}) == "torch: 1 -> 2, new: none -> x"
    warn_of_differences("RUN", None)  # begun by an earlier version
    warn_of_differences("RUN", now)
    assert caplog.messages == []
    warn_of_differences("RUN", now | {"CPU": "abacus"})
    assert caplog.messages == [
        f"RUN began under other conditions (CPU: abacus -> {now['CPU']}): it may end with other bits than without the stop"
    ]
