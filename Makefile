# Two commands for a fresh machine: `make demo` and `make test`.  Both set up what they need.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: demo test deploy sim bugs fuzz bench lint results stubs pins clean

demo: $(VENV)/demo
	$(BIN)/lightyear-node demo $(ARGS)

test: $(VENV)/dev
	$(BIN)/python -m pytest -n auto -m "$(TESTS)" $(ARGS)

# `make test TESTS="not thorough"` runs the slow ones, too: real federations under every fault.
TESTS ?= not slow and not thorough

# Images, compose, systemd, wheels: built, started and broken for real; needs Docker and root.
deploy: $(VENV)/dev
	$(BIN)/python -m pytest tests/deploy $(ARGS)

# Long runs of the round simulator, on all cores: make sim SEEDS=0:2000
SEEDS ?= 0:200
sim: $(VENV)/dev
	$(BIN)/python tests/sim/run.py --seeds $(SEEDS) $(ARGS)

# Whether chance finds every planted bug, from seeds that nobody has chosen: up to an hour.
bugs: $(VENV)/dev
	$(BIN)/python -m pytest -n auto -m thorough tests/sim $(ARGS)

# Invented inputs for everything that others write, for so long each: make fuzz SECONDS=600
SECONDS ?= 60
fuzz: $(VENV)/fuzz
	$(BIN)/python tests/fuzz/run.py all --seconds $(SECONDS)

bench: $(VENV)/dev
	for bench in tests/bench/*.py; do $(BIN)/python $$bench || exit 1; done

# The tables and figures in docs/results: about an hour on two cores.  DATA is the directory of the
# prepared data sets; RESUME=--resume goes on with what is there.
DATA ?= ../shared/data
SUITES ?= guard femnist hospitals
results: $(VENV)/dev
	for suite in $(SUITES); do $(BIN)/lightyear-node experiment docs/results/$$suite/suite.yaml \
	  --out docs/results/$$suite --data $(DATA) $(RESUME) || exit 1; done

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The generated half of the wire contract; committed, and compared by a test.
stubs: $(VENV)/dev
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. --grpc_python_out=. \
	  proto/lightyear_node/v1/exchange.proto

# constraints.txt anew, with the newest releases of everything but torch, which is chosen by hand.
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

# constraints.txt: the very versions that are tested together.
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
	rm -rf $(VENV) build dist demo-report .pytest_cache .mypy_cache .ruff_cache .hypothesis
