# Two commands: `make demo` and `make test`. Both make .venv, install the pinned versions and need nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -q install -c constraints.txt

# One thread per process: small matrices are slower on two, and parallel tests would fight for the cores.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-avx2 lint types pytest docs architecture bench bench-quick soak forge mutants sbom bench-env bench-published clean

demo: $(VENV)/.runtime
	$(BIN)/tailguard backtest --data aapl-1d+ibm-1d+msft-1d --strategy all --set trading.fee=0.0005
	$(BIN)/tailguard data plant artifacts/planted.csv --family ar --sharpe 2 --bars 3000
	$(BIN)/tailguard walkforward configs/demo.yaml --data artifacts/planted.csv --run artifacts/demo-planted
	$(BIN)/tailguard walkforward configs/demo.yaml --run artifacts/demo

test: lint types pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

pytest: $(VENV)/.dev
	$(BIN)/pytest

test-avx2: $(VENV)/.dev  # the tests as on a CPU without AVX-512
	$(BIN)/python tools/isa.py avx2 $(BIN)/pytest

docs: $(VENV)/.dev  # the documentation as a site in site/, offline; a broken link fails
	$(BIN)/mkdocs build --strict

architecture: $(VENV)/.made  # the tables of docs/architecture.md, from the imports
	$(BIN)/python tools/architecture.py

bench: $(VENV)/.bench  # half an hour; writes docs/benchmarks.md
	$(BIN)/python benchmarks/all.py

bench-quick: $(VENV)/.bench  # three minutes: does everything run?
	$(BIN)/python benchmarks/all.py --quick

soak: $(VENV)/.runtime  # an hour of training under faults
	$(BIN)/python benchmarks/soak.py --minutes 60

forge: $(VENV)/.runtime  # 2,000 damaged and 500 forged checkpoints, 800 forged records: none loads wrong, hangs or takes all memory
	$(BIN)/python benchmarks/forge.py
	$(BIN)/python benchmarks/forge_records.py

mutants: $(VENV)/.dev  # mistakes put into the code one by one: do the tests notice? Takes half an hour, and can be resumed
	$(BIN)/python benchmarks/mutants.py

sbom: $(VENV)/.runtime  # artifacts/sbom.cdx.json: what Tailguard is installed with (CycloneDX); its tool stays out of .venv
	@$(PYTHON) -m venv $(VENV)/sbom
	@$(VENV)/sbom/bin/pip --disable-pip-version-check -q install "cyclonedx-bom>=7,<8"
	@mkdir -p artifacts
	$(VENV)/sbom/bin/cyclonedx-py environment $(BIN)/python --pyproject pyproject.toml \
	  --output-format JSON --output-file artifacts/sbom.cdx.json

bench-env: $(VENV)/.bench
	$(BIN)/python benchmarks/env_speed.py

bench-published: $(VENV)/.bench  # published tables with the settings of rl-baselines3-zoo; many hours, can be resumed
	@$(PIP) mujoco box2d pygame
	@$(PIP) --no-deps rl_zoo3  # for its YAML files only
	$(BIN)/python benchmarks/published.py

bench-%: $(VENV)/.bench
	$(BIN)/python benchmarks/$*.py

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Tailguard needs Python 3.11 or newer; try: make PYTHON=python3.11 demo"; exit 2; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "Could not make a virtual environment; on Debian or Ubuntu: apt-get install python3-venv"; exit 2; }
	@touch $@

$(VENV)/.runtime: $(VENV)/.made pyproject.toml constraints.txt
	@echo "Installing Tailguard into $(VENV) (a minute or two) ..."
	@$(PIP) -e .
	@$(BIN)/tailguard warm
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	@echo "Installing the test tools into $(VENV) ..."
	@$(PIP) -e ".[dev]"
	@touch $@

$(VENV)/.bench: $(VENV)/.runtime
	@$(PIP) -e ".[bench]"
	@touch $@

clean:
	rm -rf $(VENV) artifacts/demo build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
