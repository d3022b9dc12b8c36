"""Random hyperparameters and populations for the property tests."""

from hypothesis import strategies as st

from tailguard.population import HyperparamConfig, PBTConfig

BROKEN = (None, float("nan"), float("inf"), float("-inf"), [1.0, float("nan")], [])
scores = st.one_of(
    st.sampled_from(BROKEN), st.integers(-3, 3).map(float), st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5)
)


@st.composite
def ranges(draw, name="x"):
    """A legal range of any kind."""
    kind = draw(st.sampled_from(["linear", "log", "one_minus", "one_minus_log", "integer", "integer_log"]))
    width = draw(st.floats(1e-3, 1e3))
    flags = {"is_log_scale": kind.endswith("log"), "is_one_minus": kind.startswith("one"), "is_integer": kind.startswith("int")}
    if kind == "linear":
        low = draw(st.floats(-1e3, 1e3))
        high = low + width
    elif kind == "log":
        low = draw(st.floats(1e-8, 1e2))
        high = low * (1.0 + width)
    elif flags["is_one_minus"]:
        high = 1.0 - draw(st.floats(1e-5, 1e-1))
        low = high - draw(st.floats(1e-3, 1.0))
    else:
        low = float(draw(st.integers(1 if flags["is_log_scale"] else -20, 20)))
        high = low + draw(st.integers(1, 100))
    return HyperparamConfig(
        name=name,
        min_value=low,
        max_value=high,
        perturbation_factor=draw(st.floats(1.01, 4.0)),
        perturbation_noise=draw(st.none() | st.floats(1e-3, 1.0)),
        resample_probability=draw(st.sampled_from([0.0, 0.25, 1.0])),
        **flags,
    )


@st.composite
def choices(draw, name="x"):
    """A legal list of values: of one type or mixed."""
    values = draw(
        st.lists(st.integers(-5, 5) | st.floats(-1.0, 1.0) | st.text(max_size=2), min_size=2, max_size=5, unique=True)
    )
    return HyperparamConfig(name=name, values=tuple(values))


@st.composite
def populations(draw, **fixed):
    """Legal settings of a small population."""
    search = tuple(draw(st.one_of(ranges(name), choices(name))) for name in ("a", "b")[: draw(st.integers(1, 2))])
    settings = {
        "population_size": draw(st.integers(2, 7)),
        "perturbation_interval": draw(st.integers(1, 3)),
        "exploit_method": draw(st.sampled_from(["truncation", "binary_tournament", "t_test"])),
        "explore_method": draw(st.sampled_from(["perturb", "resample", "both", "none"])),
        "inherit_hyperparams": draw(st.booleans()),
        "truncation_ratio": draw(st.floats(0.01, 0.5)),
        "metric_mode": draw(st.sampled_from(["max", "min"])),
        "synchronous": draw(st.booleans()),
        "protect_first_member": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**32)),
    }
    return PBTConfig(hyperparams=search, **{**settings, **fixed})
