"""Commands about settings: print them, explain them, begin a file of them."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tailguard.cli.settings import Settings, takes_settings
from tailguard.cli.terminal import say

# Every value is the default, but for the data: a test holds them equal.
STARTING_FILE = """\
# Settings of a run: `tailguard train FILE`, `tailguard walkforward FILE`.
# What is left out keeps its default. `tailguard config` prints all settings, `tailguard config --explain training.risk`
# says what they mean, and docs/config.md is the whole reference.

data: [nasdaq-1d]          # shipped sets (`tailguard data list`) or your own files; a+b is a portfolio

trading:
  fee: 0.001               # commission per side, a fraction of the amount traded: 0.001 is 10 basis points
  half_spread: 0.0         # half of the bid-ask spread, paid on every fill
  slippage: 0.0            # further adverse move of the price on every fill
  fill: next_open          # decide at the close, fill at the next open; or close, next_close
  leverage: 1.0            # largest gross exposure, as a multiple of equity
  long_only: false         # true forbids short positions
  band: 0.0                # a target closer than this to the present weight is not traded; 0.05 trades less
  cash_rate: 0.0           # interest per year on cash
  borrow_rate: 0.0         # paid per year on the value of short positions

training:
  steps: 65536             # environment steps, the most that a selection may choose; more fit the past better, not the future
  seed: 0                  # the same seed gives the same agent, bit for bit
  test_share: 0.3          # share of the bars, at the end, that training never sees
  policy: auto             # chosen on held-out bars between MlpPolicy and MlpLstmPolicy, which is recurrent
  network:
    lstm_hidden_size: 16   # size of the LSTM; larger ones learn the noise of the past by heart
    net_arch: [16]         # hidden layers, null is [64, 64]
    censored: false        # true: less noise for agents that go to their limits
  learning_rate: 0.0003    # size of a gradient step
  n_envs: 32               # accounts that trade side by side
  n_steps: 64              # steps per account between updates
  batch_size: null         # samples per gradient step, null is a quarter of n_steps * n_envs
  n_epochs: 4              # passes over each rollout
  gamma: 0.95              # discount: 0.95 looks about 20 bars ahead
  gae_lambda: 0.95         # lambda of the advantages; lower trusts the critics more
  clip_range: 0.2          # how far an update may move the policy; 0.1 is more cautious
  risk:
    objective: neutral     # the mean return; cvar is the average of its worst share alpha
    alpha: 0.05            # that share: 0.05 is the worst 5 %
  entropy:
    initial: 0.001         # how much randomness is paid for; 0.01 explores more
  optimizer:
    name: adam             # or adamw, sgd, upgd, adaptive_upgd, upgdw
  vgs: null                # {} switches on shorter steps where gradients are noisy
  adversary: null          # {epsilon: 0.1} trains against perturbed observations

walkforward:
  folds: 5                 # trainings along the time axis, each tested on the bars up to the next
  seeds: 5                 # trainings per fold that differ by chance alone
"""


@takes_settings()
def run_config(
    settings: Settings,
    explain: Annotated[bool, typer.Option("--explain", help="Say what the settings mean instead.")] = False,
    key: Annotated[
        str | None, typer.Argument(metavar="[KEY]", help="With --explain: a key or section, e.g. training.risk.")
    ] = None,
) -> None:
    """Print the whole configuration as YAML (the defaults, your file, your overrides), or explain its keys."""
    if key is not None and not explain:
        raise ValueError(f"{key}: a key is explained with --explain; a file is named with --config")
    from tailguard.config import dump_config
    from tailguard.config_help import explain_key

    sys.stdout.write(explain_key(key) if explain else dump_config(settings.load()))


def run_init(
    path: Annotated[Path, typer.Argument(metavar="[PATH]", help="The file to write.")] = Path("tailguard.yaml"),
) -> None:
    """Write a commented starting file with the settings that people change."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(STARTING_FILE)
    except FileExistsError:
        raise ValueError(f"{path} exists already: name another file") from None
    say(f"wrote {path}: `tailguard walkforward {path}` trains and judges with it")


def run_warm() -> None:
    """Compile for this CPU now what the first training, backtest and verdict would otherwise wait for."""
    say("compiling for this CPU (half a minute, once) ...")
    from tailguard.experiments.warm import warm_up

    say("compiled" if warm_up() else "nothing to do: it is compiled, or there is no folder to keep it in")
