"""The command line as a user meets it: real processes, real exit codes."""

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys

import pandas as pd
import pytest

from tailguard.cli import main
from tailguard.config import Config, load_config
from tailguard.evaluate import backtest
from tailguard.market import TradingRules, load_dataset, random_walk
from tailguard.market.baselines import STRATEGIES, strategy

TINY = [
    "training.steps=256",
    "training.n_envs=4",
    "training.n_steps=32",
    "training.tensorboard=null",
    "selection={blocks: 2, seeds: 1, stops: [0.5, 1.0]}",
]


def set_options(*settings):
    return [word for setting in settings for word in ("--set", setting)]


def run(*arguments, **environment):
    command = [sys.executable, "-c", "from tailguard.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
@pytest.mark.parametrize(("command", "code"), [(["data", "list"], 0), (["act", "nowhere"], 2), (["backtest", "nowhere"], 2)])
def test_standard_streams_may_be_closed(command, code):
    script = 'exec "$0" -c "from tailguard.cli import main; main()" "$@" <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", script, sys.executable, *command], check=False).returncode == code


@pytest.fixture(scope="module")
def own_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "mine.csv"
    random_walk(400, seed=1).to_csv(path)
    return path


def understood(path):
    return f"read {path}: 400 bars of 1 day, 2000-01-01 00:00:00 to 2001-02-03 00:00:00; separated by commas, times ISO 8601\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["data"], "Missing command"),
        (["data", "describe"], "Missing argument"),
        (["data", "describe", "absent.csv"], "absent.csv: no such file, and no shipped set of that name"),
        (["backtest", "--data", "ibm-1d+ibm-1d"], "'ibm-1d' appears twice"),
        (["backtest"], "no data: name a shipped set or a file with --data"),
        (["backtest", "--data", "nasdaq-1d", "--strategy", "sma"], "no strategy named 'sma'; known are buy_and_hold"),
        (["backtest", "--data", "nasdaq-1d", "--strategy", "momentum:skip=x"], "'skip=x' must look like key=number"),
        (
            ["backtest", "--data", "nasdaq-1d", "--strategy", "momentum:jump=1"],
            "no parameter 'jump'; it takes lookback, skip",
        ),
        (["backtest", "--data", "nasdaq-1d", "--strategy", "momentum:skip=300"], "skip is 300, but it must be at least 0"),
        (["backtest", "--data", "nasdaq-1d", "--set", "trading.fee=2"], "trading.fee is 2: must be less than 1"),
        (["backtest", "--data", "nasdaq-1d", "--config", "none.yaml"], "none.yaml: cannot be read"),
        (["backtest", "--data", "nasdaq-1d", "--format", "pdf"], "'pdf' is not one of"),
        (["config", "--set", "trading.fees=2"], "trading.fees: unknown key; known are active, assets, band"),
        (
            ["config", "--explain", "training.risk.alfa"],
            "no setting named 'training.risk.alfa'; did you mean training.risk.alpha?",
        ),
        (["config", "training.risk"], "training.risk: a key is explained with --explain"),
        (["resume", "nowhere"], "nowhere is not a run"),
        (["evaluate", "nowhere"], "nowhere is not a run"),
        (["judge"], "nothing to judge: give --returns FILE, or --weights FILE with --bars FILE"),
        (["judge", "--returns", "absent.csv"], "absent.csv: no such file"),
        (["judge", "--weights", "absent.csv"], "--weights needs --bars: a file or a shipped data set"),
        (["judge", "--returns", "absent.csv", "--trials", "0"], "Input should be greater than or equal to 1"),
        (["trials"], "the ledger is off: TAILGUARD_LEDGER is set to 'off'"),
        (["attack", "nowhere"], "nowhere is not a run"),
        (["export", "nowhere"], "nowhere is not a run"),
        (["act", "nowhere"], "nowhere is not a run"),
        (["compare", "nowhere", "nowhere"], "nowhere/evaluation holds no evaluation"),
        (["walkforward"], "no data: name a shipped set or a file with --data"),
        (["walkforward", "--set", "data=[ibm-1d, msft-1d]"], "2 data sets, ibm-1d and msft-1d: name one with --data"),
        (["population", "--data", "nasdaq-1d"], "population"),
    ],
)
def test_mistakes_of_the_user_end_with_one_line_and_exit_code_2(arguments, message):
    result = run(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_help_and_version_exit_with_0():
    assert "backtest" in run("--help").stdout
    assert run("--version").stdout.startswith("tailguard ")
    assert run().returncode == 0


def test_data_list_names_every_shipped_set():
    sets = json.loads(run("data", "list", "--format", "json").stdout)
    assert {entry["name"] for entry in sets} >= {"nasdaq-1d", "btcusd-1h", "eurusd-1h", "aapl-1d", "ibm-1d", "msft-1d"}
    assert "nasdaq-1d" in run("data", "list").stdout


def test_data_check_tells_good_from_bad(tmp_path, own_file):
    assert run("data", "check", str(own_file)).stdout == "OK: the data is clean\n"
    bad = tmp_path / "bad.csv"
    bad.write_text(own_file.read_text().replace(",", ",-", 8))
    result = run("data", "check", str(bad))
    assert result.returncode == 2
    assert "error: " in result.stdout


def test_data_describe_shows_the_warnings_of_a_shipped_set():
    output = run("data", "describe", "btcusd-1h").stdout
    assert "20,111 bars" in output
    assert "warning: 100.0% of the opens repeat the previous close" in output


def test_backtest_prints_the_figures_of_the_library():
    result = run("backtest", "--data", "nasdaq-1d", "--strategy", "all", "--set", "trading.fee=0.0005", "--format", "csv")
    rows = {row["strategy"]: row for row in csv.DictReader(io.StringIO(result.stdout))}
    assert list(rows) == list(STRATEGIES)
    expected = backtest(load_dataset("nasdaq-1d"), "momentum", strategy("momentum"), TradingRules(fee=0.0005))
    assert float(rows["momentum"]["sharpe"]) == expected.sharpe


def test_backtest_runs_on_a_users_file_and_on_a_portfolio(own_file):
    for source in (str(own_file), "aapl-1d+ibm-1d"):
        result = run("backtest", "--data", source, "--strategy", "momentum:lookback=50,skip=5", "--strategy", "buy_and_hold")
        assert result.returncode == 0
        assert "momentum:lookback=50,skip=5" in result.stdout
        assert result.stderr == (understood(own_file) if source == str(own_file) else "")


def test_train_prints_the_agent_beside_the_baselines(own_file, tmp_path):
    command = ["train", "--data", str(own_file), "--run", str(tmp_path / "run"), *set_options(*TINY), "--format", "csv"]
    result = run(*command)
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert [row["strategy"] for row in rows] == ["agent", *STRATEGIES]
    assert result.stderr == f"{understood(own_file)}run: {tmp_path / 'run'}\n"
    again = run("resume", str(tmp_path / "run"), "--format", "csv")
    assert again.stdout == result.stdout
    refused = run(*command)
    assert refused.returncode == 2
    assert "is not empty: `tailguard resume" in refused.stderr


@pytest.fixture(scope="module")
def trained(own_file, tmp_path_factory):
    """A run, the rows that `train` printed, and the metrics that `evaluate` wrote."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    printed = run("train", "--data", str(own_file), "--run", str(folder), *set_options(*TINY), "--format", "json")
    assert run("evaluate", str(folder)).returncode == 0
    metrics = json.loads((folder / "evaluation" / "metrics.json").read_text())
    return folder, {row["strategy"]: row for row in json.loads(printed.stdout)}, metrics


@pytest.mark.parametrize("strategy", ["agent", "buy_and_hold", "moving_average", "random_positions"])
def test_the_table_of_train_is_that_of_evaluate_to_the_last_digit(trained, strategy):
    _, rows, metrics = trained
    for figure in ("total_return", "cagr", "sharpe", "max_drawdown", "cvar_5", "turnover", "costs"):
        assert rows[strategy][figure] == metrics["statistics"][strategy][figure]["value"], figure


def test_the_clean_row_of_attack_is_the_agent_of_evaluate(trained):
    folder, _, metrics = trained
    assert run("attack", str(folder), "--epsilon", "0.1", "--steps", "1", "--quiet").returncode == 0
    clean = json.loads((folder / "attack.json").read_text())["rows"][0]
    assert clean["kind"] == "clean"
    for figure in ("cagr", "sharpe", "cvar_5", "max_drawdown", "turnover"):
        assert clean["figures"][figure]["estimate"] == metrics["statistics"]["agent"][figure]["value"], figure


def test_train_reads_the_data_and_builds_the_features_once(own_file, tmp_path, monkeypatch, capsys):
    """In this process, so that calls can be counted."""
    from tailguard.cli import main
    from tailguard.experiments import prepared_market

    calls = []
    monkeypatch.setattr(prepared_market, "load_source", counted(prepared_market.load_source, calls))
    monkeypatch.setattr(prepared_market, "build_features", counted(prepared_market.build_features, calls))
    options = set_options(*TINY, "selection=null")
    with pytest.raises(SystemExit) as ended:
        main(["train", "--data", str(own_file), "--run", str(tmp_path / "run"), *options, "--quiet"])
    assert ended.value.code == 0
    assert calls == ["load_source", "build_features"]


def counted(function, calls):
    def call(*arguments, **options):
        calls.append(function.__name__)
        return function(*arguments, **options)

    return call


def test_pipes_get_no_colour_and_no_progress():
    result = run("backtest", "--data", "eurusd-1h", "--strategy", "buy_and_hold", FORCE_COLOR="", NO_COLOR="1")
    assert "\x1b" not in result.stdout + result.stderr
    assert "backtests" not in result.stderr


def test_config_prints_what_was_set():
    output = run("config", "--set", "trading.fee=0.0123").stdout
    assert "fee: 0.0123" in output
    assert "horizons:" in output


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("training.risk.objective=cvr", "training.risk.objective is 'cvr': must be 'neutral', 'cvar'"),
        ("training.critics={twin: false}", "training.critics: unknown key"),
        ("training.batch_size=100", "training.batch_size is 100, but it must be a divisor of 2048"),
        ("training.adversary.perturbable=[retrun_1]", "feature is 'retrun_1', but it must be one of return_1"),
    ],
)
def test_a_mistake_in_the_settings_is_found_before_a_run_folder_is_made(own_file, tmp_path, setting, message):
    result = run("train", "--data", str(own_file), "--run", str(tmp_path / "run"), "--set", setting)
    assert result.returncode == 2
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_config_explains_a_key_a_section_and_everything():
    key = run("config", "--explain", "training.risk.alpha").stdout
    assert key.startswith("training.risk.alpha: number in (0, 1] or list of 2 numbers in (0, 1]; default 0.05\n")
    assert "the worst 5 %" in key
    section = run("config", "--explain", "training.critic").stdout
    assert "training.critic.distribution: quantile, monotone or categorical" in section
    assert "training.critic.scale.beta: number in (0, 1]; default 0.2" in section
    assert "training.risk" not in section
    whole = run("config", "--explain").stdout
    assert key in whole
    assert "population.hyperparams[].min_value: number or null; default null" in whole


def test_init_writes_a_file_that_loads_and_never_overwrites(tmp_path):
    path = tmp_path / "mine.yaml"
    assert run("init", str(path)).returncode == 0
    text = path.read_text()
    config = load_config(path)
    assert config == Config(data=config.data)
    assert config.data == ("nasdaq-1d",)
    settings = [line for line in text.splitlines() if re.match(r" *\w+: \S", line)]
    assert len(settings) > 30
    assert all("  # " in line for line in settings)
    path.write_text("data: []\n")
    refused = run("init", str(path))
    assert refused.returncode == 2
    assert "exists already" in refused.stderr
    assert path.read_text() == "data: []\n"


POPULATION = """population={population_size: 2, perturbation_interval: 1, intervals: 1, validation_blocks: BLOCKS,
    hyperparams: [
    {name: learning_rate, min_value: 1.0e-4, max_value: 1.0e-3, is_log_scale: true}]}"""


@pytest.mark.parametrize("command", ["train", "walkforward", "population"])
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("trading.episode_length=5000", "not enough bars: episodes of 5000 steps"),
        ("training.adversary.perturbable=[nonsense]", "training.adversary.perturbable: feature is 'nonsense'"),
        ("training.adversary.perturbable=[999]", "perturbable is (999,)"),
    ],
)
def test_settings_that_do_not_fit_the_data_leave_no_folder(command, setting, message, tmp_path):
    data, folder = tmp_path / "walk.csv", tmp_path / "run"
    random_walk(1200, seed=1).to_csv(data)
    options = set_options(*TINY, POPULATION.replace("BLOCKS", "2"), "walkforward.folds=2", "walkforward.seeds=1", setting)
    result = run(command, "--data", str(data), "--run", str(folder), *options, "--quiet")
    assert result.returncode == 2
    assert message in result.stderr.splitlines()[-1]
    assert not folder.exists()


def test_more_blocks_than_bars_leave_no_folder(own_file, tmp_path):
    options = set_options(*TINY, POPULATION.replace("BLOCKS", "400"))
    result = run("population", "--data", str(own_file), "--run", str(tmp_path / "run"), *options, "--quiet")
    assert "population.validation_blocks is 400, but it must be at most" in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["train", "walkforward"])
def test_a_run_needs_a_folder_and_not_a_file(command, own_file):
    before = own_file.read_bytes()
    options = set_options(*TINY, "walkforward.warmup=0", "walkforward.folds=1", "features.drawdown_window=20")
    result = run(command, "--data", str(own_file), "--run", str(own_file), *options, "--quiet")
    assert result.returncode == 2
    assert f"error: {own_file} is a file, but --run must name a folder\n" in result.stderr
    assert own_file.read_bytes() == before


def test_train_takes_the_data_of_the_configuration(own_file, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(f"data: [{own_file}]\n")
    result = run("train", "--config", str(config), "--run", str(tmp_path / "run"), *set_options(*TINY), "--quiet")
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["data"] == str(own_file)
    assert "no data: name a shipped set or a file with --data" in run("train").stderr


def test_a_walk_forward_does_not_overwrite_a_run(trained, own_file):
    folder, _, _ = trained
    before = (folder / "evaluation" / "metrics.json").read_bytes()
    options = set_options(*TINY, "walkforward.warmup=0", "walkforward.folds=1", "features.drawdown_window=20")
    result = run("walkforward", "--data", str(own_file), "--run", str(folder), *options, "--quiet")
    assert result.returncode == 2
    assert "is not empty: it holds no walk-forward" in result.stderr
    assert (folder / "evaluation" / "metrics.json").read_bytes() == before
    assert not (folder / "walkforward.json").exists()


def test_a_population_is_not_resumed_with_other_settings(own_file, tmp_path):
    settings = [*TINY, POPULATION.replace("BLOCKS", "2")]
    command = ["population", "--data", str(own_file), "--run", str(tmp_path / "run"), "--engine", "serial", "--quiet"]
    first = run(*command, *set_options(*settings))
    assert first.returncode == 0, first.stderr
    assert run(*command, *set_options(*settings)).stdout == first.stdout
    assert run(*command).stdout == first.stdout
    refused = run(*command, *set_options(*settings, "training.gamma=0.5"))
    assert refused.returncode == 2
    assert "holds a population of other settings" in refused.stderr


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", [], "no decision: 0 bars are too few"),
        ("time,open,high,low,close\n2020-01-01,1,1,1,1\n", [], "no decision: 1 bars are too few"),
        ("time,close\n2020-01-01,1,1,1,1\n2020-01-02,1\n2020-01-03,1,2,3,4,5,6\n", [], "no rows of a time and four prices"),
        ("", ["--since", "someday"], "--since is 'someday', but it must be a time in ISO 8601"),
    ],
)
def test_bars_that_no_agent_can_act_on_end_with_one_line(trained, tmp_path, text, options, message):
    bars = tmp_path / "bars.csv"
    bars.write_text(text)
    result = run("act", str(trained[0]), "--bars", str(bars), *options)
    assert (result.returncode, result.stdout) == (2, "")
    assert [line.split()[0] for line in result.stderr.splitlines()] in (["error:"], ["read", "error:"])
    assert message in result.stderr


def test_decisions_may_be_asked_for_since_a_time_with_a_zone(trained, own_file):
    since = "2001-01-31T00:00"
    zoned = run("act", str(trained[0]), "--bars", str(own_file), "--since", f"{since}+00:00")
    plain = run("act", str(trained[0]), "--data", str(own_file), "--since", since)  # as the other commands call it
    assert zoned.returncode == 0, zoned.stderr
    assert zoned.stdout == plain.stdout != ""


@pytest.mark.parametrize("form", ["onnx", "torchscript"])
def test_an_export_that_cannot_be_written_ends_with_one_line(trained, tmp_path, form):
    blocked = tmp_path / "file"
    blocked.write_text("")
    result = run("export", str(trained[0]), "--format", form, "--output", str(blocked / "agent"))
    assert result.returncode == 2
    assert str(blocked) in result.stderr
    assert result.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == ["file"]


def test_a_judged_strategy_has_a_report_and_is_in_the_ledger(own_file, tmp_path):
    """Weights of a file, traded on the bars of a file; then its own returns; then what the ledger knows."""
    environment = {"TAILGUARD_LEDGER": str(tmp_path / "trials.jsonl")}
    weights, output = tmp_path / "weights.csv", tmp_path / "out"
    sides = random_walk(400, seed=1)["close"].diff().fillna(0.0).gt(0.0).astype(float).rename("weight")
    sides.to_csv(weights)
    arguments = ["--weights", str(weights), "--bars", str(own_file), "--output", str(output), "--set", "trading.fee=0.0005"]
    result = run("judge", *arguments, **environment)
    assert result.returncode == 0, result.stderr
    assert "over buy and hold" in result.stdout
    assert "own_mix" not in result.stdout
    metrics = json.loads((output / "evaluation" / "metrics.json").read_text())
    assert result.stdout.startswith(metrics["verdict"]["headline"].replace("_", " "))
    assert metrics["bars"] == 399
    page = (output / "report.html").read_text()
    assert str(tmp_path) not in page
    assert str(own_file.parent) not in page
    tracks = pd.read_csv(output / "evaluation" / "tracks.csv")
    returns = tmp_path / "returns.csv"
    tracks[tracks["kind"] == "agent"][["time", "return"]].to_csv(returns, index=False)
    again = run(
        "judge", "--returns", str(returns), "--benchmark", str(own_file), "--output", str(tmp_path / "two"), **environment
    )
    assert again.returncode == 0, again.stderr
    numbers = json.loads((tmp_path / "two" / "evaluation" / "metrics.json").read_text())
    same = [each["statistics"]["agent"]["max_drawdown"]["value"] for each in (metrics, numbers)]
    assert same[0] == pytest.approx(same[1])
    known = run("trials", "--format", "json", **environment)
    assert [entry["strategy"] for entry in json.loads(known.stdout)] == ["weights.csv", "returns.csv"]
    assert run("trials", "--path", **environment).stdout.strip() == environment["TAILGUARD_LEDGER"]
    off = run("judge", *arguments, "--no-ledger", **environment)
    assert "The ledger of trials was off" in off.stdout
    assert len(json.loads(run("trials", "--format", "json", **environment).stdout)) == 2


def test_a_lack_of_memory_is_one_line(monkeypatch, capsys):
    def starve(*_):
        raise MemoryError

    monkeypatch.setattr("tailguard.config.load_config", starve)
    with pytest.raises(SystemExit) as ended:
        main(["config"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: out of memory: ")


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_a_signal_ends_a_command_that_has_nothing_to_save_with_one_line(tmp_path, number, word):
    """It waits for somebody who writes into its data."""
    os.mkfifo(tmp_path / "bars.csv")
    command = [sys.executable, "-c", "from tailguard.cli import main; main()", "data", "check", str(tmp_path / "bars.csv")]
    waiting = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    with (tmp_path / "bars.csv").open("w"):  # opens when the other end is open
        waiting.send_signal(number)
        assert waiting.communicate(timeout=200.0)[1] == f"{word}\n"
    assert waiting.returncode == 128 + number
