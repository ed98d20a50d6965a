# `make demo` and `make test` work on a fresh machine and set up what they need.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: demo test test-all coverage deploy sim bugs mutants fuzz bench lint results stubs pins clean

demo: $(VENV)/demo
	$(BIN)/lightyear-node demo $(ARGS)

# One process runs all tests of a file: they may share a federation.
PYTEST := $(BIN)/python -m pytest -n auto --dist loadscope --no-loadscope-reorder

# Takes minutes: unit tests, a short simulation, and one small federation of real nodes.
test: $(VENV)/dev
	$(PYTEST) -m "not slow and not thorough" $(ARGS)

# Includes the slow tests: real federations under faults, monitored by a browser and Prometheus.
test-all: $(VENV)/dev
	$(PYTEST) -m "not thorough" $(ARGS)

# Which lines of the package the quick unit tests execute, in this process; child processes are not
# measured.  Incomplete files are listed; ARGS=--cov-report=html also writes htmlcov/.
coverage: $(VENV)/dev
	$(PYTEST) -m "not slow and not thorough" tests/unit --cov --cov-report=term-missing $(ARGS)

# Images, compose, systemd and wheels on a real engine; needs Docker and root.
deploy: $(VENV)/dev
	$(BIN)/python -m pytest tests/deploy $(ARGS)

# Long runs of the round simulator, on all cores: make sim SEEDS=0:2000
SEEDS ?= 0:200
sim: $(VENV)/dev
	$(BIN)/python tests/sim/run.py --seeds $(SEEDS) $(ARGS)

# Searches arbitrary seeds for every planted bug: up to an hour.
bugs: $(VENV)/dev
	SIM_PROFILE=thorough $(PYTEST) -m thorough tests/sim $(ARGS)

# Mutation test of the protocol core: ten minutes of one core.
# ARGS="--only protocol/peer_table.py" for one module, ARGS=--again for the last survivors.
mutants: $(VENV)/dev
	$(BIN)/python tests/mutants/run.py $(ARGS)

# Fuzzes every parser of external input for SECONDS each: make fuzz SECONDS=600
SECONDS ?= 60
fuzz: $(VENV)/fuzz
	$(BIN)/python tests/fuzz/run.py all --seconds $(SECONDS)

bench: $(VENV)/dev
	for bench in tests/bench/*.py; do $(BIN)/python $$bench || exit 1; done

# The tables and figures in docs/results: about three hours on two cores.  DATA is the directory of the
# prepared data sets; RESUME=--resume continues an interrupted run.
DATA ?= ../shared/data
SUITES ?= guard femnist hospitals worst-case merge-check readings
results: $(VENV)/dev
	for suite in $(SUITES); do $(BIN)/lightyear-node experiment docs/results/$$suite/suite.yaml \
	  --out docs/results/$$suite --data $(DATA) $(RESUME) || exit 1; done

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The generated protobuf stubs; committed, and compared by a test.
stubs: $(VENV)/dev
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. --grpc_python_out=. \
	  proto/lightyear_node/v1/exchange.proto

# Rewrites constraints.txt with the newest releases, except torch, which is pinned by hand.
pins:
	rm -rf build/pins && $(PYTHON) -m venv build/pins
	grep '^torch==' constraints.txt > build/pins/torch
	build/pins/bin/pip install --quiet -c build/pins/torch '.[dev,fuzz]' hatchling
	build/pins/bin/pip freeze --exclude lightyear-node | grep -v '^torch==' > build/pins/others
	grep '^#' constraints.txt | cat - build/pins/torch build/pins/others > build/pins/all
	mv build/pins/all constraints.txt

$(VENV)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lightyear-node needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	touch $@

# constraints.txt pins the versions that are tested together.
$(VENV)/demo: $(VENV)/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo]'
	touch $@

$(VENV)/dev: $(VENV)/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/demo

$(VENV)/fuzz: $(VENV)/dev
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	touch $@

clean:
	rm -rf $(VENV) build dist demo-report .pytest_cache .mypy_cache .ruff_cache .hypothesis \
	  .coverage .coverage.* htmlcov
