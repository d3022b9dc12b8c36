"""The command line: parse, call, print. Mistakes of the user end with one line and exit code 2."""

import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Annotated

import typer

from tailguard.cli import configs, evaluations, execution, hedging, markets, populations, runs
from tailguard.cli.terminal import Messages, open_closed_streams
from tailguard.experiments import Interrupted, handling_signals

USER_ERROR, INTERRUPTED = 2, 130

app = typer.Typer(add_completion=False, help="Trading agents that know their own tail risk.")
app.command("init")(configs.run_init)
app.command("config")(configs.run_config)
app.add_typer(markets.data_app, name="data")
app.command("backtest")(markets.run_backtest)
app.command("train")(runs.run_train)
app.command("resume")(runs.run_resume)
app.command("evaluate")(evaluations.run_evaluate)
app.command("walkforward")(evaluations.run_walkforward)
app.command("attack")(evaluations.run_attack)
app.command("judge")(evaluations.run_judge)
app.command("control")(evaluations.run_control)
app.command("trials")(evaluations.run_trials)
app.command("compare")(evaluations.run_compare)
app.command("population")(populations.run_population)
app.command("execute")(execution.run_execute)
app.command("hedge")(hedging.run_hedge)
app.command("deploy")(runs.run_deploy)
app.command("export")(runs.run_export)
app.command("act")(runs.run_act)
app.command("paper")(runs.run_paper)
app.command("warm")(configs.run_warm)


def _version(requested: bool) -> None:
    if requested:
        from tailguard import __version__

        sys.stdout.write(f"tailguard {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Trading agents that know their own tail risk."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; the user's mistakes become one line on stderr and exit code 2."""
    open_closed_streams()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    Messages().install()
    try:
        with handling_signals(_stop):  # what has something to save handles signals itself
            code = app(arguments or ["--help"], standalone_mode=False)
    except typer.TyperException as error:
        _fail(f"{error.format_message()} (--help shows what is possible)")
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    except ValueError as error:
        _fail(str(error))
    except MemoryError:
        _fail("out of memory: smaller data, networks, training.n_envs or training.n_steps need less")
    except Interrupted as stopped:
        sys.stderr.write(f"{stopped}\n")
        sys.exit(stopped.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.stderr.write("interrupted\n")
        sys.exit(INTERRUPTED)
    if code == INTERRUPTED:  # a second Ctrl-C, which Typer takes for an exit
        sys.stderr.write("interrupted\n")
    sys.exit(code if isinstance(code, int) else 0)


def _stop(number: int, _: FrameType | None) -> None:
    raise Interrupted("interrupted" if number == signal.SIGINT else "terminated", number)


def _fail(message: str) -> None:
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    sys.exit(USER_ERROR)
