"""Mutants: small mistakes, put into the code one at a time. The tests of that part must notice every one of them.

    python benchmarks/mutants.py --results artifacts/mutants.jsonl

A mutant is an exact replacement in one file of a copy of ``src``; the tests that are named for the part run against the copy. A
mutant that they do not notice survives, and shows a test that is missing. Finished mutants are kept in a file and not repeated.
"""

import argparse
import importlib
import json
import math
import os
import resource
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# A mutant has made its tests hang, and is noticed, after so many seconds, and so many times what they take without it.
SECONDS, TIMES = 300, 10
LONGEST = 3600  # seconds of the tests of a part, on a machine that others use as well
ADDRESS_SPACE = 12 * 2**30  # beyond which a mutant takes all memory, and is noticed

# Loaded once; never Tailguard itself.
LIBRARIES = (
    "torch",
    "numba",
    "pandas",
    "pyarrow",
    "scipy.stats",
    "stable_baselines3",
    "gymnasium",
    "hypothesis",
    "safetensors",
)
# By part: the tests that hold it.
TESTS = {
    "ppo/targets.py": ["tests/ppo/test_targets.py"],
    "ppo/loss.py": ["tests/ppo/test_loss.py"],
    "ppo/risk.py": ["tests/ppo/test_risk.py"],
    "ppo/saved_form.py": ["tests/io/test_forged.py", "-k", "not sample"],
    "io/atomic.py": ["tests/io/test_power_cut.py", "tests/io/test_checkpoint.py"],
    "io/checkpoint.py": ["tests/io/test_checkpoint.py", "tests/io/test_forged.py", "-k", "not sample"],
    "io/checkpoint_folder.py": ["tests/io/test_checkpoint.py", "tests/io/test_power_cut.py"],
    "io/form.py": ["tests/io/test_forged.py", "-k", "not sample"],
    "io/lock.py": ["tests/io/test_reading.py"],
    "io/reading.py": ["tests/io/test_reading.py", "tests/io/test_forged.py", "-k", "not sample"],
    "io/sealed.py": ["tests/experiments/test_run_identity.py"],
    "parallel/worker.py": ["tests/parallel/test_tasks.py", "-k", "dies"],
    "experiments/run.py": ["tests/experiments/test_run_identity.py"],
    "market/kernel.py": ["tests/market/test_accounting.py", "tests/market/test_stops.py", "tests/market/test_env.py"],
    "market/accounting.py": ["tests/market/test_accounting.py"],
    "market/env.py": ["tests/io/test_forged.py", "-k", "not sample"],
    "evaluate/verdict.py": ["tests/evaluate/test_verdict.py"],
}

MUTANTS: list[tuple[str, str, str]] = [
    # -------------------------------------------------------------------------------------------------- targets of the critics
    ("ppo/targets.py", "future = 0.0 if terminated[t, b] else next_values[t, b]", "future = next_values[t, b]"),
    ("ppo/targets.py", "if terminated[t, b] or truncated[t, b] else later[b]", "if terminated[t, b] else later[b]"),
    ("ppo/targets.py", "values[t, b] + gamma * lam * carried", "values[t, b] + lam * carried"),
    ("ppo/targets.py", "ended = t == steps - 1 or terminated[t, b] or truncated[t, b]", "ended = t == steps - 1 or terminated[t, b]"),
    ("ppo/targets.py", "if draws[t, b, j] < keep else next_quantiles[t, b, j]", "if draws[t, b, 0] < keep else next_quantiles[t, b, j]"),
    ("ppo/targets.py", "later[b, j] = rewards[t, b] + gamma * z", "later[b, j] = rewards[t, b] + z"),
    ("ppo/targets.py", "bad &= unused.reshape", "bad |= unused.reshape"),
    # ------------------------------------------------------------------------------------------------------- loss of the policy
    ("ppo/loss.py", "totals[0] -= weight * min(free, clipped)", "totals[0] -= weight * max(free, clipped)"),
    ("ppo/loss.py", "min(max(ratio, 1.0 - clip), 1.0 + clip) * advantage", "min(ratio, 1.0 + clip) * advantage"),
    ("ppo/loss.py", "return -free if free <= clipped else 0.0", "return -free"),
    ("ppo/loss.py", "totals[3] += weight * (growth - log_ratio)", "totals[3] += weight * (growth + log_ratio)"),
    ("ppo/loss.py", "by_mean[2, a], by_log_std[2, a] = away, 1.0 - spread", "by_mean[2, a], by_log_std[2, a] = away, spread - 1.0"),
    ("ppo/loss.py", "0.5 * (spread - 1.0) - old_log_std + log_std", "0.5 * (spread - 1.0) + old_log_std - log_std"),
    ("ppo/loss.py", "by_entropy = -probs[j] * (logs[j] + entropies[k])", "by_entropy = -probs[j] * logs[j]"),
    ("ppo/loss.py", "kl += old_probs[j] * (old_logs[j] - logs[j])", "kl += probs[j] * (logs[j] - old_logs[j])"),
    ("ppo/loss.py", "if abs(ratio - 1.0) > clip:", "if ratio - 1.0 > clip:"),
    ("ppo/loss.py", "weight * inverse[a] * grad_mean, weight * grad_log_std", "weight * grad_mean, weight * grad_log_std"),
    # ----------------------------------------------------------------------------------------------------------------- tail risk
    ("ppo/risk.py", "left / self.discount(columns).clamp(min=1e-30)", "left"),
    ("ppo/risk.py", "capped = torch.minimum(plain, budget) - budget.clamp(max=0.0)", "capped = torch.minimum(plain, budget)"),
    ("ppo/risk.py", "in_tail = np.clip(alpha - (upto - weights), 0.0, weights)", "in_tail = np.clip(alpha - upto, 0.0, weights)"),
    ("ppo/risk.py", "np.tile(masses, cut))) / (ended + cut)", "np.tile(masses, cut))) / ended"),
    ("ppo/risk.py", "self.rollouts.appendleft((totals[surplus:], atoms", "self.rollouts.appendleft((totals, atoms"),
    ("ppo/risk.py", "config.weight, config.weight / self._annealed(alpha)", "config.weight, config.weight"),
    ("ppo/risk.py", "missing = config.limit - metrics", "missing = -config.limit + metrics"),
    ("ppo/risk.py", "if recent[0] > best[0]:", "if recent[0] < best[0]:"),
    # --------------------------------------------------------------------------------------------------------------------- files
    ("io/atomic.py", "            os.fsync(file.fileno())\n", ""),
    ("io/atomic.py", "    sync_folder(path.parent)\n\n\ndef make_folder", "\n\ndef make_folder"),
    ("io/atomic.py", "    for part in missing:\n        sync_folder(part.parent)\n", ""),
    ("io/atomic.py", "        unfinished.unlink(missing_ok=True)\n        raise", "        raise"),
    ("io/checkpoint.py", "if _description(tensors[part]) != expected:", "if _description(tensors[part])[\"shape\"] != expected[\"shape\"]:"),
    ("io/checkpoint.py", "if hashlib.sha256(text.encode()).hexdigest() != checksum:", "if not checksum:"),
    ("io/checkpoint.py", 'if manifest["kind"] != kind:', 'if manifest["kind"] is None:'),
    ("io/checkpoint.py", "kind.kind in \"iuf\" and raw.dtype == np.uint8 and raw", "kind.kind in \"iuf\" and raw"),
    ("io/checkpoint_folder.py", "if performance > self._best_performance():", "if performance >= -math.inf:"),
    ("io/checkpoint_folder.py", "for old in self.paths()[: -self.keep]:", "for old in self.paths()[: -1]:"),
    ("io/checkpoint_folder.py", "for path in reversed(paths):", "for path in paths:"),
    ("io/sealed.py", "if expected is not None and expected != _checksum(values):", "if expected is not None and not expected:"),
    ("io/reading.py", "if not stat.S_ISREG(status.st_mode):", "if stat.S_ISDIR(status.st_mode):"),
    ("io/reading.py", "if not stat.S_ISREG(mode):", "if stat.S_ISDIR(mode):"),
    ("io/lock.py", "    require_writable(folder / LOCK)\n", ""),
    ("parallel/worker.py", "except (EOFError, OSError):  # it has", "except (EOFError, ConnectionResetError):  # it has"),
    ("io/form.py", "require(not unknown, name", "require(True, name"),
    ("ppo/saved_form.py", "    require_same_shapes(weights, expected)\n", ""),
    ("experiments/run.py", "        run._require_known_changes(allow_config_change)\n", ""),
    ("market/env.py", "        require(ordered, \"the saved clock\"", "        require(True, \"the saved clock\""),
    # ------------------------------------------------------------------------------------------------------------------ accounts
    ("market/kernel.py", "return notional * (adverse + fee * (1.0 + side * adverse))", "return notional * (adverse + fee)"),
    ("market/kernel.py", "accounts[b, CASH] -= trade + slippage + fee", "accounts[b, CASH] -= trade + fee"),
    ("market/kernel.py", "if value < 0.0:\n            cost -=", "if value > 0.0:\n            cost -="),
    ("market/kernel.py", "cost += bars[t, a, FUNDING] * value", "cost -= bars[t, a, FUNDING] * value"),
    ("market/kernel.py", "decided = t if same_bar else t - 1", "decided = t"),
    ("market/kernel.py", "extreme = bars[t, a, LOW] if units > 0.0 else", "extreme = bars[t, a, HIGH] if units > 0.0 else"),
    ("market/kernel.py", "price = opening if side * (opening - stop) <= 0.0 else stop", "price = stop"),
    ("market/kernel.py", "(accounts[b, UNITS + assets + a] * before + price * bought) / after", "price"),
    ("market/kernel.py", "rewards[b] = math.log(accounts[b, EQUITY] / before)", "rewards[b] = accounts[b, EQUITY] / before - 1.0"),
    ("market/kernel.py", "target[a] *= high / exposure", "target[a] /= exposure"),
    ("market/accounting.py", "sigma = returns.rolling(window, min_periods=2).std().shift(1)", "sigma = returns.rolling(window, min_periods=2).std()"),
    ("market/accounting.py", "spread=rules.half_spread + rules.slippage", "spread=rules.slippage"),
    # ------------------------------------------------------------------------------------------------------------------- verdict
    ("evaluate/verdict.py", "passed = edge.p_value < rules.size / 2.0", "passed = edge.p_value < rules.size * 2.0"),
    ("evaluate/verdict.py", "passed = bool(ndtr(luck - alpha.alpha_t) < rules.size / 2.0)", "passed = bool(ndtr(-alpha.alpha_t) < rules.size / 2.0)"),
    ("evaluate/verdict.py", "evidence.deflated > 1.0 - rules.size", "evidence.deflated > 0.5"),
    ("evaluate/verdict.py", "(noise >= difference.estimate - luck).sum()", "(noise >= difference.estimate).sum()"),
    ("evaluate/verdict.py", "agree = bool(middle > 0.0 and high - low <= middle)", "agree = bool(high - low <= middle + 1.0)"),
    ("evaluate/verdict.py", "    if evidence.better:\n", "    if evidence.better and False:\n"),
    ("evaluate/verdict.py", "bars = max(math.ceil(evidence.bars * (largest / rules.worthwhile) ** 2)", "bars = max(math.ceil(evidence.bars * (largest / rules.worthwhile))"),
]  # fmt: skip


@dataclass(frozen=True)
class Result:
    """What became of a mutant.

    :param number: its place in :data:`MUTANTS`.
    :param mutant: file, what was there, and what is there now.
    :param killed: whether a test has failed.
    :param seconds: that the tests took.
    """

    number: int
    mutant: tuple[str, str, str]
    killed: bool
    seconds: float


def run_tests(copy: Path, part: str, seconds: float = LONGEST) -> bool:
    """Return True if the tests of a part pass against a copy of the source.

    They run in a fork of this process, which has loaded the libraries: that takes longer than most of the tests.

    :param seconds: after which they hang, and fail.
    """
    child = os.fork()
    if child == 0:
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        os.chdir(ROOT)
        os.environ["PYTHONPATH"] = str(copy)
        sys.path.insert(0, str(copy))
        signal.alarm(math.ceil(seconds))
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
        loaded = "ignore::pytest.PytestAssertRewriteWarning"  # some libraries import plugins of pytest
        os._exit(int(pytest.main(["-n", "0", "-x", "-q", "-p", "no:cacheprovider", "-W", loaded, *TESTS[part]])))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (0, 1, -signal.SIGALRM):  # nothing was tested
        raise RuntimeError(f"the tests of {part} did not run: pytest ended with {code}")
    return code == 0


def try_mutant(copy: Path, mutant: tuple[str, str, str], usual: float) -> bool:
    """Return True if the tests notice a mutant; the copy is as before afterwards.

    :param usual: seconds that the tests take without it.
    """
    part, old, new = mutant
    path = copy / "tailguard" / part
    text, status = path.read_text(), path.stat()
    if text.count(old) != 1:
        raise ValueError(f"{part}: {old!r} occurs {text.count(old)} times, but it must be once")
    path.write_text(text.replace(old, new))
    try:
        return not run_tests(copy, part, SECONDS + TIMES * usual)
    finally:
        path.write_text(text)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # what numba has compiled of it is valid again


def finished(path: Path) -> dict[tuple[str, str, str], Result]:
    """Return the results of an earlier run."""
    if not path.exists():
        return {}
    results = [Result(**{**json.loads(line), "mutant": tuple(json.loads(line)["mutant"])}) for line in path.open()]
    return {result.mutant: result for result in results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("artifacts/mutants.jsonl"))
    parser.add_argument("--again", action="store_true", help="Try survivors of earlier runs again.")
    parser.add_argument("--only", default="", help="Parts whose name contains this.")
    arguments = parser.parse_args()
    known = {mutant: result for mutant, result in finished(arguments.results).items() if result.killed or not arguments.again}
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    chosen = [(number, mutant) for number, mutant in enumerate(MUTANTS) if arguments.only in mutant[0]]
    waiting = [(number, mutant) for number, mutant in chosen if mutant not in known]
    # Kept beside the results: what was compiled for one mutant serves the others, also after a stop.
    copy, compiled = (arguments.results.resolve().with_suffix(suffix) for suffix in (".src", ".numba"))
    os.environ |= {"NUMBA_CACHE_DIR": str(compiled), "OMP_NUM_THREADS": "1"}
    for library in LIBRARIES:
        importlib.import_module(library)
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    usual: dict[str, float] = {}  # seconds of the tests of a part that pass without any mutant
    for number, mutant in waiting:
        began = time.monotonic()
        if mutant[0] not in usual and not run_tests(copy, mutant[0]):
            raise SystemExit(f"the tests of {mutant[0]} fail without any mutant")
        usual.setdefault(mutant[0], time.monotonic() - began)
        began = time.monotonic()
        killed = try_mutant(copy, mutant, usual[mutant[0]])
        known[mutant] = Result(number, mutant, killed, round(time.monotonic() - began, 1))
        with arguments.results.open("a") as file:
            file.write(json.dumps(vars(known[mutant])) + "\n")
        print(f"{'killed' if killed else 'SURVIVED'} {number} {mutant[0]}: {mutant[1]!r} -> {mutant[2]!r}", flush=True)
    results = [known[mutant] for _, mutant in chosen]
    killed = sum(result.killed for result in results)
    print(f"\n{killed} of {len(results)} mutants killed ({killed / len(results):.1%})")
    for result in results:
        if not result.killed:
            print(f"survived: {result.mutant[0]}: {result.mutant[1]!r} -> {result.mutant[2]!r}")
    raise SystemExit(0 if killed >= 0.95 * len(results) else 1)


if __name__ == "__main__":
    main()
