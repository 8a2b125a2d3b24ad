# What a user touches. Needs make, a Python >= 3.11 with venv, and pip's access to a package index; everything else goes into .venv.
#   make up PORT=9000 DECODE=2      every capital word below can be set like this

MODEL   ?= deploy/demo_model
PREFILL ?= 1
DECODE  ?= 1
MIXED   ?= 0
PORT    ?= 8000
RUN_DIR ?= run
UP_FLAGS ?=
TEST_FLAGS ?=
SEEDS   ?= 1000
SEED    ?=
SIM_FLAGS ?=
SOAK_S  ?= 1800
FUZZ_S  ?= 60
TARGET  ?=
# Where torch is besides pip's own index. auto: its build for CPUs, where there is no GPU and pip is told of no index; empty: nowhere.
TORCH_INDEX ?= auto
CHAOS_FLAGS ?=
CLIENTS_FLAGS ?=
BENCH_FLAGS ?=

BIN := .venv/bin
PYTHON := $(BIN)/python
STAMP := .venv/.installed
COMPILED := kernels/cpu/built/.compiled
KERNELS := kernels/cpu/built/.built
ALL_KERNELS := kernels/cpu/built/.all
REDIS := .venv/.redis
HELM := .venv/.helm
BROWSER := .venv/.browser
TEST_PROGRAMS := $(REDIS) $(HELM) $(BROWSER)
BYTECODE := .venv/.bytecode
TINY := models/llama-tiny
# A path in quotes, in which the shell would leave a ~ as it is; not every shell has made it a path before make sees it.
quoted = '$(if $(filter ~/%,$(firstword $(1))),$(subst ~/,$(HOME)/,$(1)),$(1))'
MADE_MODEL := $(if $(findstring |$(TINY)|,|$(MODEL)|),$(TINY)/config.json)
PROTO_FLAGS := --python_out=. --mypy_out=. --grpc_python_out=. --mypy_grpc_out=.

.DELETE_ON_ERROR:
# Kernels compile while packages come, and types are checked beside what tests want and the first of them. What a recipe starts, another make too, knows
# nothing of that.
MAKEFLAGS += --jobs=3
unexport MAKEFLAGS
# Bytecode is kept, whatever the shell says: without it each node compiles torch's modules anew, which is most of its start.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help setup test-setup up test tested bench lint style types format proto tree docs pictures sim soak fuzz mutants compose-test clients coverage-table clean

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) $(KERNELS) ## fill .venv with the pinned versions, compile the kernels; a second call does nothing

test-setup: setup $(TEST_PROGRAMS) ## find a redis-server, HAProxy, Helm and a browser, which tests want; as root with apt, install what is missing

$(PYTHON):
	@set -e; \
	for name in python3 python3.13 python3.12 python3.11 python3.14; do \
	  if $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$name; break; fi; \
	done; \
	if [ -z "$${python:-}" ]; then echo "make setup: no Python >= 3.11 on the PATH" >&2; exit 2; fi; \
	if ! $$python -c 'import venv, ensurepip' 2>/dev/null; then \
	  echo "make setup: $$python has no venv module; install it first (Debian, Ubuntu: apt-get install python3-venv)" >&2; exit 2; \
	fi; \
	echo "make setup: .venv with $$($$python --version); one to five minutes, once"; \
	$$python -m venv --clear .venv

# torch, whose build for CPUs pip may have been told of, is pip's to bring; then uv takes a sixth of pip's time, but knows nothing of its
# settings: all is pip's where they name another index, or where uv fails. Without a GPU, and without an index of the user's, torch
# comes from the one that has it without CUDA. Modules are compiled when they are first imported: those that Baton has at the end, so
# that the first `make up` is no slower than the second, and thousands of others never.
$(STAMP): pyproject.toml constraints.txt | $(PYTHON)
	@set -ef; $(PYTHON) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m ensurepip >/dev/null; \
	index='$(TORCH_INDEX)'; \
	if [ "$$index" = auto ]; then index=; \
	  command -v nvidia-smi >/dev/null || $(PYTHON) -m pip config list | grep -E '[.](extra-)?index-url=|[.]find-links=|[.]no-index=' >/dev/null \
	    || index=https://download.pytorch.org/whl/cpu; \
	fi; \
	echo "make setup: torch, 200 MB$${index:+ from $$index}; several gigabytes where that is no build for CPUs"; \
	trap 'exit 130' INT TERM; \
	dots=; if [ -t 2 ]; then { while sleep 5 && kill -0 $$$$ 2>/dev/null; do printf . >&2; done; } & dots=$$!; trap 'kill $$dots; echo >&2' EXIT; fi; \
	$(PYTHON) -m pip install -qq --no-compile $${index:+--extra-index-url "$$index"} "$$(grep '^torch==' constraints.txt)" -c constraints.txt; \
	[ -z "$$dots" ] || echo >&2; echo "make setup: the other packages, 300 MB"; \
	packages="-c constraints.txt -e .[dev,nixl,numba,triton]"; \
	if $(PYTHON) -m pip config list | grep '[.]index-url' >/dev/null || ! $(PYTHON) -m pip install -qq --no-compile -c constraints.txt uv \
	  || ! $(BIN)/uv pip install -q --system-certs --python $(PYTHON) $$packages 2>.venv/.uv.log; \
	then $(PYTHON) -m pip install -qq --no-compile $$packages; fi; \
	$(PYTHON) -P -c 'import deploy.launcher, node.process, router.process'; \
	touch $(STAMP)

# Half a minute, once: what this CPU runs best. It needs no package, and so waits for none.
$(COMPILED): $(wildcard kernels/cpu/*.h kernels/cpu/*.cpp kernels/cpu_build.py) | $(PYTHON)
	@$(PYTHON) -m kernels.cpu_build --here
	@mkdir -p $(@D) && touch $@

# Without a C++ compiler numba's functions are compiled, and a line says what that costs.
$(KERNELS): $(COMPILED) | $(STAMP)
	@ls $(@D)/*.so >/dev/null 2>&1 || $(PYTHON) -m kernels.numba_kernels
	@touch $@

# All that this CPU can run, whose bits tests compare; that the rest compiles is a test of its own.
$(ALL_KERNELS): $(KERNELS)
	@$(PYTHON) -m kernels.cpu_build --usable
	@touch $@

# For the tests of the registry in Redis, and of the front of routers. Tried once, and never a reason to fail: they say by themselves
# what there is not. Beside pip, as what is below.
$(REDIS): | $(PYTHON)
	@if command -v redis-server >/dev/null && command -v haproxy >/dev/null; then :; \
	elif [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
	  echo "make: no redis-server or no haproxy, and only root can install them, where there is apt: the tests that want them will say so"; \
	elif echo "make: redis-server and haproxy, for tests, from the distribution"; \
	  export DEBIAN_FRONTEND=noninteractive; install="timeout 300 apt-get install -y --no-install-recommends redis-server haproxy"; \
	  $$install >$@.log 2>&1 || { timeout 120 apt-get update && $$install; } >>$@.log 2>&1; then :; \
	else echo "make: redis-server or haproxy cannot be installed ($@.log says why): the tests that want them will say so"; fi
	@touch $@

# For the tests of the chart: Helm's own code as a library (the package around it wants a newer Python than we do), and the classes of
# Kubernetes' objects, which are read as text. 55 MB. Tried once, and never a reason to fail, as above.
$(HELM): constraints.txt | $(STAMP)
	@rm -rf .venv/helm && mkdir .venv/helm
	@echo "make: Helm and the classes of Kubernetes' objects, for tests"
	@if $(PYTHON) -m pip download -qq --no-deps --only-binary :all: --python-version 3.12 -c constraints.txt -d .venv/helm helm-sdkpy kubernetes >$@.log 2>&1 && \
	  for wheel in .venv/helm/*.whl; do $(PYTHON) -m zipfile -e $$wheel .venv/helm; done; then rm .venv/helm/*.whl; \
	else echo "make: they cannot be had ($@.log says why): the tests of the chart will say so"; fi
	@touch $@

# For the tests of the dashboard. Tried once, and never a reason to fail, as above; behind $(REDIS), as one apt-get waits for no other.
$(BROWSER): | $(REDIS)
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then :; \
	elif [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
	  echo "make: no chromium with its driver, and only root can install them, where there is apt: the tests of the dashboard will say so"; \
	elif echo "make: chromium, for tests, from the distribution"; \
	  export DEBIAN_FRONTEND=noninteractive; install="timeout 600 apt-get install -y --no-install-recommends chromium chromium-driver fonts-dejavu-core"; \
	  $$install >$@.log 2>&1 || { timeout 120 apt-get update && $$install; } >>$@.log 2>&1; then :; \
	else echo "make: chromium cannot be installed ($@.log says why): the tests of the dashboard will say so"; fi
	@touch $@

# Made beside its place and moved: an interrupted run leaves no half model.
$(TINY)/config.json: | $(STAMP)
	@rm -rf $(TINY).part
	$(PYTHON) -m engine.make_model --like llama-tiny --dtype fp32 --seed 0 --out $(TINY).part
	@rm -rf $(TINY) && mv $(TINY).part $(TINY)

up: $(STAMP) $(KERNELS) $(MADE_MODEL) ## a router, a prefill and a decode node on the demo model, here; Ctrl-C ends them
	@$(BIN)/baton up --model $(call quoted,$(MODEL)) --prefill $(PREFILL) --decode $(DECODE) --mixed $(MIXED) --port $(PORT) --run-dir $(call quoted,$(RUN_DIR)) $(UP_FLAGS)

# Of tests and of all that they import: four processes that begin together would each compile all of it. Not of what loads the
# kernels, which are compiled meanwhile.
$(BYTECODE): | $(STAMP)
	@$(PYTHON) -m pytest --collect-only -qq --ignore tests/kernels --ignore tests/engine_torch >$@.log 2>&1 || true
	@touch $@

test: tested types ## lint, types, the tests: of some that draw, a share (make soak)

# Tests wait for a third of their time: with three processes on two cores a fifth of the cores' time went by idle, with four none does.
tested: $(BYTECODE) style $(ALL_KERNELS) $(TEST_PROGRAMS)
	@$(PYTHON) -m pytest -n 4 --dist loadfile $(TEST_FLAGS)

bench: $(STAMP) $(KERNELS) ## thirteen benchmarks briefly, in twenty minutes or less: bench/results/suite.md, and the table in the README; BENCH_FLAGS="--envs DIR": peers too
	@$(PYTHON) -m bench $(BENCH_FLAGS)

lint: style types ## ruff and mypy

style: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP)
	@$(BIN)/mypy

format: $(STAMP) ## let ruff rewrite what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

proto: $(STAMP) ## generate the modules of proto/baton.proto anew
	@PATH="$(BIN):$$PATH" $(PYTHON) -m grpc_tools.protoc -I. $(PROTO_FLAGS) proto/baton.proto

tree: $(STAMP) ## write the tree at the end of README.md anew, from each file's first docstring line
	@$(PYTHON) -m tests.architecture.readme_tree

docs: $(STAMP) ## write what the docs say of flags, metrics and protocols, the drawings, and the schema of the chart's values anew, from the code
	@$(PYTHON) -m tests.router.metrics_table
	@$(PYTHON) -m tests.architecture.protocol_page
	@$(PYTHON) -m tests.architecture.flags_page
	@$(PYTHON) -m tests.sim.drawing
	@$(PYTHON) -m tests.deploy.chart_schema

pictures: $(STAMP) $(KERNELS) $(BROWSER) ## take the pictures of docs/pictures anew: the dashboard of a cluster here, in a headless browser
	@$(PYTHON) -m tests.dashboard.pictures $(if $(MADE_MODEL),,--model $(call quoted,$(MODEL)))

sim: $(STAMP) ## a whole cluster in one thread, with everything that goes wrong, from SEEDS=1000 seeds; SEED=7 plays one again and prints its log
	@$(PYTHON) -m tests.sim $(if $(SEED),--seed $(SEED),--seeds $(SEEDS)) $(SIM_FLAGS)

fuzz: $(STAMP) ## atheris on everything that reads what others wrote, FUZZ_S=60 seconds each; TARGET=name for one
	@$(PYTHON) -m tests.security $(TARGET) --seconds $(FUZZ_S)

soak: $(STAMP) $(ALL_KERNELS) $(TEST_PROGRAMS) ## 10000 seeds of sim that nobody has seen, SOAK_S=1800 seconds of real processes killed, stopped, cut off, then every test with all that it can draw
	@$(PYTHON) -m tests.sim --seeds 10000 --first $$(date +%s)0000 $(SIM_FLAGS)
	@$(PYTHON) -m tests.chaos --seconds $(SOAK_S) $(CHAOS_FLAGS)
	@THOROUGH=1 FUZZ_EXAMPLES=2000 $(PYTHON) -m pytest -n 4 --dist loadfile --timeout=3600

mutants: $(STAMP) ## plant known bugs one at a time in a copy, and say which of them the tests notice; ONLY=name,name for some
	@$(PYTHON) -m tests.mutants $(ONLY)

compose-test: $(STAMP) $(KERNELS) ## build the images and hurt the containers of deploy/compose.yaml; needs a Docker engine, and root for a partition
	@$(PYTHON) -m pytest tests/compose $(TEST_FLAGS)

clients: $(STAMP) $(KERNELS) $(MADE_MODEL) ## other people's clients (openai, langchain, litellm, lm-eval, vllm, guidellm) against a cluster; ONLY=name,name for some; installs gigabytes
	@$(PYTHON) -m tests.clients $(ONLY) --model $(call quoted,$(MODEL)) $(CLIENTS_FLAGS)

coverage-table: $(STAMP) $(ALL_KERNELS) $(TEST_PROGRAMS) ## run the tests and write docs/coverage.md: the tests that prove each row of docs/checklist.md
	@$(PYTHON) -m pytest -n 4 --dist loadfile --coverage-table=docs/coverage.md

clean: ## remove what make made, .venv included; of models/ the tiny one only
	rm -rf .venv run $(TINY) build kernels/cpu/built kernels/numba_built *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@rmdir models 2>/dev/null || true
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
