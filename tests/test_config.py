"""The configuration: one tree, one file, and errors that name the key."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

import tailguard.config
from tailguard import DistributionalPPO
from tailguard.config import (
    SEARCHABLE,
    Config,
    CriticConfig,
    LayersConfig,
    NetworkConfig,
    ObsNormConfig,
    RiskConfig,
    TrainingConfig,
    VGSConfig,
    dump_config,
    load_config,
)
from tailguard.experiments.population_member import ACCESSORS
from tailguard.experiments.prepared_market import default_split, prepare_market
from tailguard.experiments.training import build_model
from tailguard.market import random_walk
from tailguard.ppo.networks import ACTIVATIONS, network_kwargs
from tailguard.ppo.policy import DistributionalPolicy

FIXTURES = Path(__file__).parent / "fixtures"

BAD_SETTINGS = {
    "trading.fee=-0.1": "trading.fee is -0.1: must be greater than or equal to 0",
    "trading.fee=1.5": "trading.fee is 1.5: must be less than 1",
    "trading.fee=.nan": "trading.fee is nan: must be ",
    "trading.fee=free": "trading.fee is 'free': must be a valid number",
    "trading.fees=0.1": "trading.fees: unknown key; known are active, assets, band",
    "trading.fill=yesterday": "trading.fill is 'yesterday': must be 'next_open', 'close' or 'next_close'",
    "trading.sizing=big": "trading.sizing is 'big': must be 'cost_aware' or 'pre_cost'",
    "trading.leverage=0": "trading.leverage is 0: must be greater than 0",
    "trading.leverage=.inf": "trading.leverage is inf: must be a finite number",
    "trading.participation=2": "trading.participation is 2: must be less than or equal to 1",
    "trading.impact_window=1": "trading.impact_window is 1: must be greater than or equal to 2",
    "trading.cash=0": "trading.cash is 0: must be greater than 0",
    "trading.episode_length=0": "trading.episode_length is 0: must be greater than or equal to 1",
    "trading.episode_length=2.5": "trading.episode_length is 2.5: must be a valid integer",
    "trading.long_only=perhaps": "trading.long_only is 'perhaps': must be a valid boolean",
    "trading={fee: 0.5, leverage: 3}": "cannot carry a gross exposure of 3",
    "features.horizons=[]": "features.horizons: horizons must be different numbers",
    "features.horizons=[1, 1]": "features.horizons: horizons must be different numbers",
    "features.horizons=[0]": "features.horizons.0 is 0: must be greater than or equal to 1",
    "features.macd=[26, 12, 9]": "features.macd: macd is (fast, slow, signal) with fast < slow",
    "features.rsi=1": "features.rsi is 1: must be greater than or equal to 2",
    "features.clip=0": "features.clip is 0: must be greater than 0",
    "feature.rsi=14": "feature: unknown key; known are benchmark, checkpoints, data, execution, features",
    "training.riks=1": "known are adversary, batch_size, clip_range, ",
    "training.riks=2": "; did you mean risk?",
    "training.risk.objective=cvr": "training.risk.objective is 'cvr': must be 'neutral', 'cvar', 'mean_cvar' or 'constrained'",
    "training.risk.alfa=0.1": "training.risk.alfa: unknown key; known are alpha, ",
    "training.risk.alpha=2": "training.risk.alpha is 2: must be less than or equal to 1 or must be a list",
    "training.risk.alpha=[0.5, 0.1]": "training.risk.alpha is (0.5, 0.1), but it must be (low, high)",
    "training.risk.objective=constrained": "training.risk.limit is None, but it must be the least CVaR",
    "training={gamma: 0, risk: {objective: cvar}}": "training.gamma is 0.0, but it must be above 0",
    "training.critic.distribution=free": "training.critic.distribution is 'free': must be 'quantile', 'monotone' or",
    "training.critic.law=free": "training.critic.law is 'free': must be 'quantile'",
    "training.critic={law: quantile, distribution: quantile}": "training.critic.law: unknown key",
    "training.critic.scale.beta=0": "training.critic.scale.beta is 0: must be greater than 0",
    "training.optimizer={name: sgd, sigma: 0.1}": "training.optimizer.sigma is 0.1, but it must be left out for",
    "training.vgs.beta=1": "training.vgs.beta is 1: must be less than 1",
    "training.vgs=5": "training.vgs is 5: must be keys and values",
    "training.entropy={final: 0.1}": "training.entropy.decay_steps is 0, but it must be at least 1",
    "training.kl.mode=sometimes": "training.kl.mode is 'sometimes': must be 'none', 'early_stop', 'penalty' or 'adaptive_lr'",
    "training.adversary.epsilon=-1": "training.adversary.epsilon is -1: must be greater than or equal to 0",
    "training.adversary.perturbable=[rsi, 3]": "training.adversary.perturbable is ('rsi', 3), but it must be all names or",
    "training.adversary.perturbable=[-1]": "training.adversary.perturbable.0 is -1: must be greater than or equal to 0",
    "training.normalize_obs.clip=0": "training.normalize_obs.clip is 0: must be greater than 0",
    "training.normalize_obs=often": "training.normalize_obs is 'often': must be keys and values",
    "training.network.net_arch=5": "training.network.net_arch is 5: must be keys and values or must be a list",
    "training.network.net_arch=[64, 0]": "training.network.net_arch.1 is 0: must be greater than 0",
    "training.network.net_arch={actor: [3]}": "training.network.net_arch.actor: unknown key; known are pi, vf",
    "training.network.activation_fn=sine": "training.network.activation_fn is 'sine': must be 'tanh', 'relu'",
    "training.network={squash_output: true, censored: true}": "training.network.censored is True, but it must be False",
    "training={lstm_hidden_size: 4, network: {lstm_hidden_size: 8}}": "network.lstm_hidden_size is 8, but it must be 4",
    "training.lstm_hidden_size=0": "training.network.lstm_hidden_size is 0: must be greater than 0",
    "training.batch_size=100": "training.batch_size is 100, but it must be a divisor of 2048 made of whole sequences",
    "training={policy: MlpPolicy, batch_size: 64, microbatch_size: 3}": "training.microbatch_size is 3, but it must be",
    "population.hyperparams=[{name: colour, values: [1, 2]}]": "population.hyperparams is 'colour', but it must be one of ",
    "population.hyperparams=[{name: robust_kl_coef, values: [0.1, 0.2]}]": "training.adversary set: there is none",
    "population.hyperparams=[{values: [1, 2]}]": "population.hyperparams.0.name: is missing",
    "trading=5": "trading is 5: must be keys and values",
    "trading.fee": "must look like section.key=value",
    "=5": "must look like section.key=value",
    "trading..fee=1": "must look like section.key=value",
    "trading.fee=[1": "is not a YAML value",
}


@pytest.mark.parametrize(("setting", "message"), BAD_SETTINGS.items(), ids=BAD_SETTINGS)
def test_bad_setting_gives_one_line_with_the_key_and_what_is_legal(setting, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the text is checked below)
        load_config(None, [setting])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trading: [1, 2", "is not YAML"),
        ("just text", "must hold keys and values"),
        ("trading:\n  fee: -1\n", "trading.fee is -1: must be greater than or equal to 0"),
        ("tradings:\n  fee: 1\n", "tradings: unknown key"),
    ],
)
def test_bad_file_is_named(tmp_path, text, message):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        load_config(path)
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)


def test_absent_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none.yaml: cannot be read"):
        load_config(tmp_path / "none.yaml")


def test_tree_survives_the_trip_through_yaml(tmp_path):
    config = load_config(
        None, ["trading.fee=0.0005", "features.horizons=[1, 3]", "data=[nasdaq-1d]", "trading.episode_length=9"]
    )
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(config))
    assert load_config(path) == config
    assert load_config(path) != Config()


def test_overrides_win_over_the_file_and_leave_the_rest(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("trading:\n  fee: 0.002\n  slippage: 0.001\n")
    config = load_config(path, ["trading.fee=0.003"])
    assert (config.trading.fee, config.trading.slippage) == (0.003, 0.001)


def test_a_section_that_is_off_is_switched_on_by_its_keys(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("training: {adversary: null, vgs: null}\n")
    config = load_config(path, ["training.adversary.epsilon=0.2", "training.vgs.beta=0.9"])
    assert config.training.adversary.epsilon == 0.2
    assert config.training.vgs.beta == 0.9
    with pytest.raises(ValueError, match="steps is not a section"):
        load_config(None, ["training.steps=5", "training.steps.deep=1"])


def test_an_empty_file_is_the_defaults(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("")
    assert load_config(path) == Config()


def test_it_does_not_load_pytorch():
    names = ("config", "config_help", "cli", "ppo.config", "optim.config", "robust.config", "population.config")
    imports = f"import sys, {', '.join(f'tailguard.{name}' for name in names)}"
    code = f"{imports}; assert 'torch' not in sys.modules; from tailguard.optim import UPGD; assert 'torch' in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_all_settings_classes_can_be_imported_from_it():
    for name in tailguard.config.__all__:
        assert hasattr(tailguard.config, name)
    nested, found = [Config], set()
    while nested:
        section = nested.pop()
        found.add(section)
        nested += [
            inner for field in section.model_fields.values() for inner in tailguard.validation.sections_of(field.annotation)
        ]
    assert found <= {getattr(tailguard.config, name) for name in tailguard.config.__all__}
    assert all(issubclass(section, BaseModel) for section in found)


def test_a_file_of_a_run_of_an_earlier_version_loads():
    """Dumped when the sections of training were untyped: `law` and `lstm_hidden_size` had their older names and places."""
    training = load_config(FIXTURES / "config-untyped-training.yaml").training
    assert training.network.lstm_hidden_size == 8
    assert training.risk == RiskConfig(objective="cvar", alpha=0.2)
    assert training.critic == CriticConfig(distribution="monotone", num_quantiles=21)
    assert (training.optimizer.name, training.optimizer.sigma) == ("adaptive_upgd", 0.01)
    assert training.vgs == VGSConfig(enabled=True)
    assert (training.adversary.epsilon, training.adversary.perturbable) == (0.05, ("return_*", "rsi"))
    assert training.model_dump(include={"entropy", "kl", "batch_size"}) == TrainingConfig().model_dump(
        include={"entropy", "kl", "batch_size"}
    )


def test_every_typed_section_survives_the_trip_through_yaml(tmp_path):
    config = load_config(
        None,
        [
            "training.risk={objective: cvar, alpha: [0.05, 0.5]}",
            "training.network={net_arch: {pi: [8], vf: [16, 16]}, activation_fn: relu, log_std_init: -0.5}",
            "training.critic={law: categorical, num_quantiles: 11, scale: {max_relative_step: null}}",
            "training.vgs={estimator: norm}",
            "training.adversary={epsilon: 0.1, perturbable: [0, 3]}",
            "training.normalize_obs=true",
            "training.kl={mode: adaptive_lr, target: 0.02}",
            "training.entropy={initial: 0.01, final: 0.001, decay_steps: 100}",
        ],
    )
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(config))
    assert load_config(path) == config
    assert config.training.network.net_arch == LayersConfig(pi=(8,), vf=(16, 16))
    assert config.training.normalize_obs == ObsNormConfig()
    assert load_config(None, ["training.normalize_obs=false"]) == Config()


def test_every_setting_of_the_model_is_a_key_of_the_training():
    """What the command line decides is left out: the environment, the device and how much is printed."""
    arguments = set(inspect.signature(DistributionalPPO.__init__).parameters)
    keys = set(TrainingConfig.model_fields)
    other_names = {"network": "policy_kwargs", "tensorboard": "tensorboard_log"}
    elsewhere = {"self", "env", "device", "verbose", "_init_setup_model"}
    sb3_only = {"clip_range_vf", "normalize_advantage", "ent_coef", "use_sde", "sde_sample_freq", "target_kl"}
    sb3_only |= {"rollout_buffer_class", "rollout_buffer_kwargs"}
    assert arguments - {other_names.get(key, key) for key in keys} - elsewhere - sb3_only == set()
    assert keys - {"steps", "minutes", "n_envs", "test_share", "pooled"} - set(other_names) <= arguments


def test_the_network_section_is_what_the_policy_takes():
    arguments = inspect.signature(DistributionalPolicy.__init__).parameters
    own = {"self", "observation_space", "action_space", "critic", "obs_norm", "risk"}
    # Classes and images: only in Python, where there is something else to see than features.
    own |= {"features_extractor_class", "features_extractor_kwargs", "share_features_extractor", "normalize_images"}
    own |= {"optimizer_class", "optimizer_kwargs", "use_sde", "full_std", "use_expln", "enable_critic_lstm", "lstm_kwargs"}
    assert set(arguments) - own == set(NetworkConfig.model_fields)
    kwargs = network_kwargs(NetworkConfig())
    assert kwargs == {name: arguments[name].default for name in NetworkConfig.model_fields}
    assert network_kwargs(NetworkConfig(net_arch=LayersConfig(pi=(3,), vf=(4, 5))))["net_arch"] == {"pi": [3], "vf": [4, 5]}
    assert network_kwargs(NetworkConfig(net_arch=(3,)))["net_arch"] == [3]
    for name, activation in ACTIVATIONS.items():
        assert network_kwargs(NetworkConfig(activation_fn=name))["activation_fn"] is activation


def test_defaults_of_the_training_are_those_of_the_model():
    """But for those that suit trading: a shorter look ahead, smaller networks, and more updates of shorter rollouts."""
    arguments = inspect.signature(DistributionalPPO.__init__).parameters
    training = TrainingConfig()
    for name in ("learning_rate", "n_epochs", "gae_lambda", "clip_range", "max_grad_norm", "vf_coef", "batch_size"):
        assert getattr(training, name) == arguments[name].default, name
    assert (training.n_steps, training.gamma, training.network.lstm_hidden_size, training.network.net_arch) == (
        64,
        0.95,
        16,
        (16,),
    )


def test_every_section_reaches_the_model():
    settings = [
        "training={n_envs: 4, n_steps: 16, batch_size: 32, microbatch_size: 16, tensorboard: null, stats_window_size: 7}",
        "training.policy=MlpLstmPolicy",
        "training.gae_lambda=0.9",
        "training.clip_range=0.1",
        "training.max_grad_norm=0.7",
        "training.vf_coef=0.3",
        "training.network={net_arch: {pi: [8], vf: [6]}, activation_fn: relu, lstm_hidden_size: 5}",
        "training.network.censored=true",
        "training.network.compiled=false",
        "training.critic={num_quantiles: 7, scale: {beta: 0.5}}",
        "training.risk={objective: cvar, alpha: 0.2, period: 5}",
        "training.optimizer={name: adamw, weight_decay: 0.02}",
        "training.entropy.initial=0.02",
        "training.kl={mode: early_stop, target: 0.02}",
        "training.vgs={}",
        "training.adversary={epsilon: 0.2, perturbable: [return_*]}",
        "training.normalize_obs={clip: 5}",
    ]
    config, bars = load_config(None, settings), random_walk(400, seed=0)
    training, market = config.training, prepare_market(bars, config, default_split(len(bars), config.training))
    model = build_model(market, training)
    assert (model.batch_size, model.microbatch_size, model._stats_window_size) == (32, 16, 7)
    assert (model.gae_lambda, model.clip_range(1.0), model.max_grad_norm, model.vf_coef) == (0.9, 0.1, 0.7, 0.3)
    assert model.critic_config is training.critic
    assert model.risk_config is training.risk
    assert model.optimizer_config is training.optimizer
    assert model.vgs_config is training.vgs
    assert model.obs_norm_config is training.normalize_obs
    assert model.entropy.config is training.entropy
    assert model.kl.config is training.kl
    named = [name for column, name in enumerate(market.features.names) if column in model.adversary_config.perturbable]
    assert named == [f"return_{horizon}" for horizon in config.features.horizons]
    assert [type(layer).__name__ for layer in model.policy.actor] == ["Linear", "ReLU", "Linear"]
    assert (model.policy.actor[0].in_features, model.policy.actor[0].out_features) == (5, 8)
    assert model.policy.critics[0][0].out_features == 6
    assert not model.policy.compiled


def test_mistakes_in_arguments_of_the_model_name_the_argument():
    for arguments, message in (
        ({"critic": {"quantiles": 3}}, "critic.quantiles: unknown key"),
        ({"risk": {"objective": "cvr"}}, "risk.objective is 'cvr': must be 'neutral', 'cvar'"),
        ({"kl": {"penalty_min": 1.0}}, "kl.penalty_initial is 0.2, but it must be within penalty_min 1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            DistributionalPPO("MlpPolicy", "CartPole-v1", **arguments)


def test_a_population_may_search_what_a_model_can_change():
    assert set(ACCESSORS) | {"learning_rate"} == SEARCHABLE


class TestLimits:
    BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{chr(ord(previous) + 1)}: &{chr(ord(previous) + 1)} [{', '.join([f'*{previous}'] * 9)}]\n" for previous in "abcdefgh"
    )

    @pytest.mark.parametrize("text", [BOMB, "data: &a [*a]\n", "a: &a {b: *a}\n"])
    def test_a_bomb_of_aliases_is_refused_at_once(self, tmp_path, text):
        path = tmp_path / "bomb.yaml"
        path.write_text(text)
        with pytest.raises(ValueError, match=r"bomb.yaml: the configuration is .* values"):
            load_config(path)

    def test_a_few_aliases_are_allowed(self, tmp_path):
        path = tmp_path / "config.yaml"
        path.write_text("data: &names [x, y]\nstrategies: *names\n")
        assert load_config(path).strategies == ("x", "y")

    def test_large_files_and_devices_are_refused(self, tmp_path):
        path = tmp_path / "large.yaml"
        path.write_text("data: [" + "x, " * 200_000 + "]")
        with pytest.raises(ValueError, match=r"large.yaml is 'more than 262,144 bytes', but it must be a file of settings"):
            load_config(path)
        with pytest.raises(ValueError, match=r"/dev/zero is 'more than"):
            load_config(Path("/dev/zero"))

    def test_deep_nesting_is_one_line(self, tmp_path):
        path = tmp_path / "deep.yaml"
        path.write_text("[" * 500)
        with pytest.raises(ValueError, match=r"deep.yaml: is not YAML"):
            load_config(path)
        with pytest.raises(ValueError, match="is not a YAML value"):
            load_config(None, ["data=" + "[" * 500])


def test_agents_that_are_averse_to_tails_have_defaults_of_their_own():
    plain, averse = (load_config(None, [f"training.risk={risk}"]).training for risk in ("{}", "{objective: cvar, period: 21}"))
    assert (plain.steps, plain.n_steps, plain.learning_rate, plain.network.log_std_init) == (65_536, 64, 3e-4, 0.0)
    assert (averse.steps, averse.n_steps, averse.learning_rate, averse.network.log_std_init) == (65_536, 32, 1e-3, -2.0)
    assert (plain.gae_lambda, averse.gae_lambda, averse.risk.weight) == (0.95, 0.5, 0.1)
    own = [
        "training.risk={objective: mean_cvar, period: 21, weight: 0.3}",
        "training.steps=4096",
        "training.network.log_std_init=0.5",
    ]
    changed = load_config(None, own).training
    assert (changed.steps, changed.n_steps, changed.network.log_std_init, changed.risk.weight) == (4096, 32, 0.5, 0.3)
    assert load_config(None, ["training.risk={objective: mean_cvar}"]).training.risk.weight == 0.5
    assert changed.network.net_arch == plain.network.net_arch
    for risk in ("{objective: neutral, period: 21}", "{objective: cvar}"):  # episodes as before
        assert load_config(None, [f"training.risk={risk}"]).training.steps == 65_536


@pytest.mark.parametrize(("text", "value"), [("21", 21), ("'21'", 21), ("1m", "1M"), ("W", "1W")])
def test_a_period_has_one_form(text, value):
    assert load_config(None, [f"training.risk={{objective: cvar, period: {text}}}"]).training.risk.period == value


def test_an_impossible_period_is_refused():
    with pytest.raises(ValueError, match="period"):
        load_config(None, ["training.risk.period=month"])
