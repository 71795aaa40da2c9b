# One command for each thing one does here. Needs Python 3.11+, git and make; the rest is installed
# into .venv once, and again when pyproject.toml changes. `make help` lists the targets.

PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$python" && break; done)
VENV := .venv
PROTO_VENV := .venv-proto
BIN := $(VENV)/bin
PIP_INSTALL := -m pip --disable-pip-version-check install --quiet
STUBS := client/python/anarchon/v1

# Arguments passed on: `make demo DEMO="--seconds 20"`, `make test TESTS=tests/unit PYTEST="-x -k s19"`.
DEMO ?=
TESTS ?= tests
PYTEST ?=
# How the whole suite is run at once: in as many processes as there are cores, see tests/conftest.py.
PARALLEL ?= -n auto --dist loadgroup --no-loadscope-reorder
# These run real processes by the real clock: one after the other, with the machine for themselves.
ALONE := tests/integration tests/conformance

.DEFAULT_GOAL := help

# The clients in other languages: each has targets check-, test- and proto- of its own in
# client/LANGUAGE/LANGUAGE.mk, and is left out, loudly, where its toolchain is not installed.
LANGUAGES := go node java
TOOL_go := go
TOOL_node := npm
TOOL_java := mvn

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(VENV)/.installed ## See three instances share jobs, and a takeover, in about a minute
	$(BIN)/anarchon demo $(DEMO)

.PHONY: test
test: $(VENV)/.installed-dev $(LANGUAGES:%=test-%-if-there) ## Run every test; core must be covered to its last branch
	tests/servers/install
ifeq ($(TESTS)$(PYTEST),tests)
	@set -x; status=0; \
	$(BIN)/pytest tests $(ALONE:%=--ignore=%) $(PARALLEL) --cov --cov-report= || status=1; \
	$(BIN)/coverage report --include='server/anarchon_server/core/*' --fail-under=100 || status=1; \
	$(BIN)/pytest $(ALONE) || status=1; \
	exit $$status
else # part of a suite cannot cover the whole core
	$(BIN)/pytest $(TESTS) $(PYTEST)
endif

.PHONY: check
check: lint types imports proto-check $(LANGUAGES:%=check-%-if-there) ## Everything that can be checked without running it

.PHONY: lint
lint: $(VENV)/.installed-dev ## Format and lint, as rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

.PHONY: types
types: $(VENV)/.installed-dev ## mypy, strict
	$(BIN)/mypy

.PHONY: imports
imports: $(VENV)/.installed-dev ## The architecture's import rules
	$(BIN)/lint-imports --no-logo

.PHONY: proto-check
proto-check: $(VENV)/.installed-dev $(PROTO_VENV)/.installed ## Lint the protocol; the committed stubs must be fresh
	cd proto && ../$(BIN)/buf lint
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && proto/generate "$$fresh" \
		&& { diff -rq --exclude=__init__.py --exclude=__pycache__ "$$fresh/anarchon/v1" $(STUBS) \
		|| { echo "The stubs in $(STUBS) are stale: run 'make proto' and commit them." >&2; exit 1; }; }

.PHONY: slots
slots: $(VENV)/.installed-dev ## Slots against their oracle, with ANARCHON_SLOT_WINDOWS=30000 (tests: 1000)
	ANARCHON_SLOT_WINDOWS=30000 $(BIN)/pytest tests/unit/server/core/test_slots_oracle.py

.PHONY: docs
docs: $(VENV)/.installed-dev ## Write anew what the pages show of the tests
	$(BIN)/python tests/docs/rules.py
	$(BIN)/python -m tests.docs.guarantees
	$(BIN)/python -m tests.docs.conformance

.PHONY: bench
bench: $(VENV)/.installed-dev ## Measure how fast slots are computed, and what a run costs on each store
	$(BIN)/python bench/slots.py
	$(BIN)/python -m bench.round_trips

.PHONY: croner
croner: $(VENV)/.installed-dev ## Compare slots with croner's around clock changes (needs node and npm)
	$(BIN)/python -m bench.compare_croner

.PHONY: format
format: $(VENV)/.installed-dev ## Format, and mend what lint can mend
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

.PHONY: proto
proto: $(PROTO_VENV)/.installed ## Generate the Python stubs anew
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && proto/generate "$$fresh" \
		&& rm -f $(STUBS)/*_pb2.py $(STUBS)/*_pb2.pyi $(STUBS)/*_pb2_grpc.py $(STUBS)/*_pb2_grpc.pyi \
		&& cp "$$fresh"/anarchon/v1/* $(STUBS)/

.PHONY: clean
clean: ## Remove environments, caches and builds
	rm -rf $(VENV) $(PROTO_VENV) .cache stubs bench/croner/node_modules client/go/.build \
		client/node/node_modules client/node/.build client/node/dist client/java/target client/examples/rust/Cargo.lock proto/stubs/rust/Cargo.lock \
		client/examples/rust/target proto/stubs/rust/target \
		build dist htmlcov .coverage .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ── Other languages ─────────────────────────────────────────────────────────────────────────────

include $(foreach language,$(LANGUAGES),client/$(language)/$(language).mk)
include proto/stubs/stubs.mk

# The tools of the protocol, which node.mk by itself takes from the PATH.
check-node proto-node: $(VENV)/.installed-dev

# Under CI=true nothing is left out.
%-if-there:
	@if command -v $(TOOL_$(lastword $(subst -, ,$*))) >/dev/null; then \
		$(MAKE) --no-print-directory $*; \
	else \
		echo "!! $* is left out: '$(TOOL_$(lastword $(subst -, ,$*)))' is not on this machine" >&2; \
		test "$$CI" != true; \
	fi

# ── Environments ────────────────────────────────────────────────────────────────────────────────

# make_venv DIR: an environment with pip, or one clear line about what the machine lacks.
define make_venv
	@test -n "$(PYTHON)" || { echo "Anarchon needs Python 3.11 or newer, and found none. Install it, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(1)/bin/pip || { rm -rf $(1); $(PYTHON) -m venv $(1) >/dev/null 2>&1; } || { rm -rf $(1); \
		echo "'$(PYTHON) -m venv' failed. On Debian and Ubuntu install it first: apt install python3-venv" >&2; exit 1; }
endef

# What the demo needs.
$(VENV)/.installed: pyproject.toml
	$(call make_venv,$(VENV))
	@echo "installing Anarchon into $(VENV) ..."
	$(BIN)/python $(PIP_INSTALL) --editable '.[server]'
	@touch $@

# What tests and checks need besides. Dependency groups want pip 25.1.
$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing what tests and checks need into $(VENV) ..."
	$(BIN)/python $(PIP_INSTALL) --upgrade 'pip>=25.1'
	$(BIN)/python $(PIP_INSTALL) --editable '.[all]' --group dev
	@touch $@

# The stubs are made with the oldest toolchain supported, which has no room beside the newest runtime.
$(PROTO_VENV)/.installed: pyproject.toml
	$(call make_venv,$(PROTO_VENV))
	@echo "installing the protocol's tools into $(PROTO_VENV) ..."
	$(PROTO_VENV)/bin/python $(PIP_INSTALL) --upgrade 'pip>=25.1'
	$(PROTO_VENV)/bin/python $(PIP_INSTALL) --group proto
	@touch $@
