# Every target sets up what it needs in .venv; all it asks of the machine is Python >= 3.11,
# make and a C++ compiler.

PYTHON ?= python3

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
NESTPIPE := $(BIN)/nestpipe
# Four workers on two cores: many tests wait for processes of their own. Compiled tests are kept, also
# where the environment forbids it: without them every worker compiles every test and its assertions.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -q -n 4 --dist worksteal
PYRIGHT := PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright
# pyright keeps one core busy for a minute, so it runs beside the tests; either may fail the target.
TYPES_BESIDE = $(PYRIGHT) & types=$$!; $(PYTEST); tests=$$?; wait $$types && exit $$tests
MUTMUT := PYTHONPATH=$(VENV)/mutmut $(BIN)/python -m mutmut
PICTURE := out/scaling.svg
# The release whose plain build runs without a GPU; with one, install the torch you need and
# set TORCH to its name.
TORCH ?= torch==2.13.0

# One variable per act of the demo, so that each can be read, copied and run alone.
DRAW_NESTED := draw nested --batches 3 --micro-batches 2
SIMULATE_SCALING := simulate --plan nested --micro-batches 8 --workers 1,8,64,512,1536,4096 --svg $(PICTURE)
VERIFY := verify --plan nested --ranks 2 --steps 8 --set pipeline.micro_batches=4
TRAIN := train --ranks 2 --set data.synthetic.samples=1500000
TRAIN_BRIEFLY := train --ranks 2 --set data.synthetic.samples=100000 --set pipeline.micro_batches=2

.PHONY: demo test test-long test-lowest slowest mutants mutmut fuzz check lint docs site wheel \
	trial first-hour \
	bench-deps clean

demo: $(READY)
	@mkdir -p $(dir $(PICTURE))
	@printf '\n== The nested plan: three batches of two micro-batches ==\n\n'
	$(NESTPIPE) $(DRAW_NESTED)
	@printf '\n== The nested plan from 1 to 4096 workers ==\n\n'
	$(NESTPIPE) $(SIMULATE_SCALING)
	@printf '\n== Training on two ranks: 26 tables that grow, generated clicks, about a minute ==\n\n'
	$(NESTPIPE) $(TRAIN)
	@printf '\n== Briefly once more, serial and nested: the same losses, and what each hides ==\n\n'
	$(NESTPIPE) $(TRAIN_BRIEFLY) --set pipeline.plan=serial
	$(NESTPIPE) $(TRAIN_BRIEFLY) --set pipeline.plan=nested
	@printf '\n== Proof: the nested plan changes no bit ==\n\n'
	$(NESTPIPE) $(VERIFY)
	@printf '\nThe baseline is always predicting the mean label. The picture of scaling is in $(PICTURE).\n'

test: lint
	$(TYPES_BESIDE)

# More examples, and an interpreter of its own for every process of a test; for a nightly run.
test-long: lint
	NESTPIPE_EXAMPLES=long; export NESTPIPE_EXAMPLES; $(TYPES_BESIDE)

# The lowest releases of all dependencies, in an environment of their own (5 GB with torch's CUDA).
test-lowest: $(READY)
	$(BIN)/python tools/lowest.py

slowest: $(READY)
	$(PYTEST) --durations=20

# Known mistakes, each of which a test must notice (tests/mutants/mutants.toml).
mutants: $(READY)
	$(BIN)/python tools/mutants.py

# Files and texts that are almost right, ten minutes for each reader; SECONDS=60 for less.
SECONDS ?= 600
fuzz: $(READY)
	$(BIN)/python tools/fuzz.py --reader all --seconds $(SECONDS)

# Random mistakes in the modules that pyproject.toml names; for a nightly run, since it takes hours.
# `$(MUTMUT) browse` shows the survivors. It comes with a pytest that it can read, in its own folder.
mutmut: $(READY)
	@$(BIN)/python -m pip install -qq --upgrade --target $(VENV)/mutmut mutmut==3.8.0 'pytest<9'
	$(MUTMUT) run --max-children 2
	$(MUTMUT) results

check: lint
	$(PYRIGHT)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

docs: $(READY)
	$(BIN)/python tools/make_docs.py

# The documentation site, in out/site; a warning, such as a link that leads nowhere, is an error.
SITE := $(BIN)/python -m sphinx -W --keep-going -q -b html docs out/site
site: $(READY)
	$(SITE)

# The first hour of a newcomer: every command of that page of the site, in a fresh environment.
first-hour: $(READY)
	$(SITE)
	$(BIN)/python tools/trial.py --fresh out/site/first_hour.html

# A wheel for each platform with the native part inside, and the sdist, in dist/.
wheel: $(READY)
	$(BIN)/python tools/make_wheels.py

# The wheel of this machine, installed where no compiler is found: train, verify, serve.
trial: $(READY)
	$(BIN)/python tools/make_wheels.py --machine $$(uname -m)
	$(BIN)/python tools/trial.py --wheel dist/nestpipe-*_$$(uname -m).whl --no-compiler

# TorchRec, as a peer for `nestpipe bench train`; without its own dependencies, which would fetch
# a GPU build of torch.
bench-deps: $(READY)
	@$(BIN)/python -m pip install -qq --no-deps fbgemm-gpu-cpu==1.8.0 torchrec==1.8.0
	@$(BIN)/python -m pip install -qq iopath pyre-extensions tensordict torchmetrics==1.0.3 tqdm psutil

# To change the interpreter of an existing .venv, run `make clean` first.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "nestpipe needs Python 3.11 or newer and '$(PYTHON)' is not one; name one with make PYTHON=python3.12" >&2; \
	  exit 1; }
	@echo "Setting up $(VENV) with nestpipe and its development tools; this takes a minute or two."
	@$(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check '$(TORCH)'
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[dev,train]'
	@touch $@

clean:
	rm -rf $(VENV) out build dist mutants .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -exec rm -rf {} +
