"""Costs and gains of a population of agents. Each function prints a markdown table; `population.py` calls them."""

import copy
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from signal_learner import DEFAULTS, N_ENVS, N_STEPS, SEARCH, SignalFactory
from stable_baselines3.common.vec_env import VecNormalize

from tailguard import DistributionalPPO
from tailguard.envs.vec_env import GymVectorAdapter
from tailguard.market import SignalMarket
from tailguard.population import PBTConfig, PBTScheduler
from tailguard.population.engines.process import ProcessEngine
from tailguard.population.engines.serial import SerialEngine
from tailguard.population.exploit import CopySettings, exploit, member_state
from tailguard.population.store import FileStore

MEMBERS, INTERVAL = 4, 15
T_QUANTILE = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 10: 2.262}  # Student, 97.5 %, by number of seeds


def search(seeds: int, horizon: int, only: str | None = None) -> None:
    """PBT against random search and fixed defaults: as many members, samples and evaluations, the same choice of the winner.

    Right after the market has turned, the best score is that of who has learnt least, and members copy him. How often they
    decide therefore matters: every 15 updates, and in one row every 5.
    """
    work = f"{MEMBERS} members x {horizon} updates of {N_ENVS * N_STEPS} steps"
    print(f"\nSignal with {SignalFactory(horizon).regimes} regimes, {work}; share of the optimum, {seeds} seeds\n")
    print("| | winner at the end | 95 % interval | best member along the way | 95 % interval | each seed's winner |")
    print("|---|---|---|---|---|---|")
    ways = {
        "PBT (truncation)": {"explore_method": "both"},
        "PBT (t-test)": {"explore_method": "both", "exploit_method": "t_test", "t_test_window": 16},
        "PBT (truncation), every 5 updates": {"explore_method": "both", "perturbation_interval": INTERVAL // 3},
        "random search": None,
        "fixed defaults": DEFAULTS,
    }
    for name, way in ways.items():
        if only is not None and only not in name:
            continue
        with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("forkserver")) as pool:
            results = np.array(list(pool.map(_population, range(seeds), [horizon] * seeds, [way] * seeds)))
        half = T_QUANTILE[seeds] * results.std(0, ddof=1) / np.sqrt(seeds)
        (end, way_along), (half_end, half_along) = results.mean(0), half
        each = " ".join(f"{value:.2f}" for value in results[:, 0])
        print(f"| {name} | {end:.3f} | ± {half_end:.3f} | {way_along:.3f} | ± {half_along:.3f} | {each} |", flush=True)


def _population(seed: int, horizon: int, way: dict | None) -> tuple[float, float]:
    """Return what the winner earns on fresh data at the end, and what the best member earned on average along the way."""
    alone = way is None or way == DEFAULTS
    nothing = {"explore_method": "none", "exploit_method": "t_test", "t_test_level": 1e-300}
    settings = {"perturbation_interval": INTERVAL, **(nothing if alone else way)}
    config = PBTConfig(population_size=MEMBERS, hyperparams=SEARCH, truncation_ratio=0.25, seed=seed, **settings)
    initial = [DEFAULTS] * MEMBERS if way == DEFAULTS else None
    best: list[float] = []
    engine = SerialEngine(PBTScheduler(config, initial), SignalFactory(horizon, optimizer="copy"))

    def note(_) -> None:
        best.append(max(member.history[-1]["performance"] for member in engine.scheduler.members))

    engine.on_round = note
    engine.run(horizon // config.perturbation_interval)
    last = [member.history[-1]["performance"] for member in engine.scheduler.members]
    winner = engine.learners[int(np.argmax(last))]
    if engine.scheduler.members[int(np.argmax(last))].performance is None:  # has just become a copy of a better one
        winner = engine.learners[engine.scheduler.best.member_id]
    return float(np.mean(winner.score(seed=99_999 + seed))), float(np.mean(best))


def throughput(updates: int, ray: bool) -> None:
    """Two members, one after the other and in two processes (and on Ray): the same work, after the start.

    On a machine that others use the wall time says little; CPU time says how much faster two free cores would be.
    """
    print(f"\nTwo members, intervals of {updates} updates, after the start\n")
    print("| engine | wall s per interval | CPU s per interval | faster, wall | with two free cores |\n|---|---|---|---|---|")
    wall, cpu = _timed(lambda scheduler, store: SerialEngine(scheduler, SignalFactory(10_000), store), updates)
    print(f"| serial | {wall:.2f} | {cpu:.2f} | 1.00 | 1.00 |", flush=True)
    factory = SignalFactory(10_000)
    ours, spent = _timed(lambda scheduler, store: ProcessEngine(scheduler, factory, store, parallel=2), updates)
    print(f"| two processes | {ours:.2f} | {spent:.2f} | {wall / ours:.2f} | {2.0 * cpu / spent:.2f} |", flush=True)
    if ray:
        from tailguard.population.engines.ray import RayEngine

        theirs, _ = _timed(lambda scheduler, store: RayEngine(scheduler, factory, store), updates)
        print(f"| Ray | {theirs:.2f} | | {wall / theirs:.2f} | {theirs - ours:+.2f} s over processes |", flush=True)


def idle_round(ray: bool) -> None:
    """Measure the cost of a round beside the training, with members that train for no time at all."""
    print("\nTwo members that do nothing: what a round costs\n\n| engine | ms per round |\n|---|---|")
    from population_toys import MovingOptimum

    engines: dict[str, Callable] = {
        "serial": lambda scheduler, store: SerialEngine(scheduler, MovingOptimum, store),
        "two processes": lambda scheduler, store: ProcessEngine(scheduler, MovingOptimum, store, parallel=2),
    }
    if ray:
        from tailguard.population.engines.ray import RayEngine

        engines["Ray"] = lambda scheduler, store: RayEngine(scheduler, MovingOptimum, store)
    for name, make in engines.items():
        print(f"| {name} | {1e3 * _timed(make, 1, rounds=20, search=MovingOptimum.search)[0]:.1f} |", flush=True)


def _timed(make: Callable, updates: int, rounds: int = 3, search=SEARCH) -> tuple[float, float]:
    """Wall and CPU seconds of an interval."""
    config = PBTConfig(population_size=2, perturbation_interval=updates, hyperparams=search)
    with tempfile.TemporaryDirectory() as folder, make(PBTScheduler(config), FileStore(folder)) as engine:
        engine.run(1)
        wall, cpu = time.perf_counter(), _cpu_of(engine)
        engine.run(1 + rounds)
        return (time.perf_counter() - wall) / rounds, (_cpu_of(engine) - cpu) / rounds


def _cpu_of(engine) -> float:
    """CPU seconds of this process and of the members' own."""
    total = time.process_time()
    if isinstance(engine, ProcessEngine):
        for member in engine.scheduler.members:
            fields = Path(f"/proc/{engine.executor.pid(member.member_id)}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def pause() -> None:
    """Measure the pause of an exploit: the copy itself, and the way through a file."""
    print("\nPause of an exploit, CPU ms (median of 20)\n")
    print("| model | parameters | save state | write file | read file | copy | one update |\n|---|---|---|---|---|---|---|")
    lstm = "MlpLstmPolicy"
    _pause_of("MLP 64x64", "MlpPolicy", {})
    _pause_of("LSTM 32", lstm, {"lstm_hidden_size": 32})
    _pause_of("LSTM 256", lstm, {"lstm_hidden_size": 256})


def _pause_of(name: str, policy: str, size: dict) -> None:
    samples = N_ENVS * N_STEPS
    source, target = (
        DistributionalPPO(
            policy, GymVectorAdapter(SignalMarket(N_ENVS), i), n_steps=N_STEPS, seed=i, policy_kwargs=dict(size)
        ).learn(samples)
        for i in range(2)
    )
    state, settings = member_state(source), CopySettings(1, {"learning_rate": 1e-3}, 3, "copy")
    with tempfile.TemporaryDirectory() as folder:
        store = FileStore(Path(folder))
        store.write("a", state)
        costs = [
            _cpu_ms(lambda: member_state(source), 20),
            _cpu_ms(lambda: store.write("a", state), 20),
            _cpu_ms(lambda: store.read("a"), 20),
            _cpu_ms(lambda: exploit(target, state, settings), 20),
            _cpu_ms(lambda: source.learn(samples, reset_num_timesteps=False), 3),
        ]
    print(f"| {name} | {source.flat.tensor.numel():,} | " + " | ".join(f"{cost:.1f}" for cost in costs) + " |", flush=True)


def _cpu_ms(work: Callable, times: int) -> float:
    taken = []
    for _ in range(times):
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    return 1e3 * float(np.median(taken))


def spike(seeds: int) -> None:
    """The first updates after an exploit with and without the source's statistics: raw value error against the source's own.

    Source and target have seen the same market in other units (observations and rewards), as after a change of volatility.
    """
    print(f"\nValue error after an exploit, over that of the source training on; median of {seeds} seeds (5 % .. 95 %)\n")
    print("| what was copied | first update | second | fifth |\n|---|---|---|---|")
    for drift in (1.5, 3.0):
        for name in ("all", "all but VecNormalize", "all but the return scale"):
            ratios = np.array([_after_exploit(seed, drift, name) for seed in range(seeds)])
            cells = [
                f"{np.median(r):.2f} ({np.quantile(r, 0.05):.2f} .. {np.quantile(r, 0.95):.2f})" for r in ratios.T[[0, 1, 4]]
            ]
            print(f"| {name}, units x {drift:g} | " + " | ".join(cells) + " |", flush=True)


class _Units(SignalMarket):
    """The market in other units."""

    unit = 1.0

    def _observe(self):
        return super()._observe() * self.unit

    def _advance(self, actions):
        rewards, terminated, truncated = super()._advance(actions)
        return rewards * self.unit, terminated, truncated


def _member(seed: int, unit: float) -> DistributionalPPO:
    market = _Units(N_ENVS)
    market.unit = unit
    env = VecNormalize(GymVectorAdapter(market, seed), norm_reward=False)
    model = DistributionalPPO(
        "MlpLstmPolicy", env, n_steps=N_STEPS, gamma=0.95, learning_rate=1e-3, seed=seed, policy_kwargs={"lstm_hidden_size": 16}
    )
    return model.learn(12 * N_ENVS * N_STEPS)


def _errors(model: DistributionalPPO, updates: int = 5) -> list[float]:
    """Root mean square error of raw values against returns, update by update: from the explained variance of the critics."""
    errors = []
    for _ in range(updates):
        model.learn(N_ENVS * N_STEPS, reset_num_timesteps=False)
        log = model.logger.name_to_value
        errors.append(np.sqrt(max(1.0 - log["train/explained_variance"], 1e-12)) * log["train/return_std"])
    return errors


def _after_exploit(seed: int, drift: float, copied: str) -> np.ndarray:
    source, target = _member(seed, 1.0), _member(seed + 1000, drift)
    target.env.venv.env.unit = 1.0  # both now live in the same market; only their statistics differ
    state, own = member_state(source), member_state(target)
    if copied == "all but VecNormalize":
        state["vec_normalize"] = own["vec_normalize"]
        for layer, mine in zip(state["run"]["environments"]["layers"], own["run"]["environments"]["layers"], strict=True):
            if layer["class"] == "VecNormalize":
                layer["state"] = copy.deepcopy(mine["state"])
    elif copied == "all but the return scale":
        for name, value in own["agent"]["policy"].items():
            if name.startswith("return_scale."):
                state["agent"]["policy"][name] = value
    exploit(target, state, CopySettings(1, {"learning_rate": 1e-3}, seed, "copy"))
    return np.array(_errors(target)) / np.array(_errors(source))
