# The TypeScript client: included by the Makefile of the root, or used alone from there with
# `make -f client/node/node.mk`. Needs node (20 or newer, to build and test), npm and, for the stubs, buf.

NODE_DIR := client/node
NODE_BUF ?= $(abspath $(or $(wildcard .venv/bin/buf),buf))
NODE_SOURCES := $(wildcard $(addprefix $(NODE_DIR)/,src/*.ts src/generated/*/*/*.ts tests/*.ts conformance/*.ts))

.PHONY: check-node
check-node: $(NODE_DIR)/node_modules/.installed ## The TypeScript client: format, lint, types, fresh stubs
	cd $(NODE_DIR) && npm run --silent lint
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && BUF=$(NODE_BUF) $(NODE_DIR)/generate "$$fresh" \
		&& { diff -rq "$$fresh" $(NODE_DIR)/src/generated \
		|| { echo "The stubs in $(NODE_DIR)/src/generated are stale: run 'make proto-node' and commit them." >&2; exit 1; }; }

.PHONY: test-node
test-node: build-node ## The TypeScript client: its unit tests
	cd $(NODE_DIR) && node --test --test-timeout=60000 .build/tests/*.test.js

.PHONY: build-node
build-node: $(NODE_DIR)/.build/.made ## The TypeScript client, its tests and its testee, compiled

.PHONY: proto-node
proto-node: $(NODE_DIR)/node_modules/.installed ## Generate the TypeScript stubs anew
	rm -rf $(NODE_DIR)/src/generated
	BUF=$(NODE_BUF) $(NODE_DIR)/generate $(NODE_DIR)/src/generated

$(NODE_DIR)/node_modules/.installed: $(NODE_DIR)/package-lock.json
	cd $(NODE_DIR) && npm ci --silent --prefer-offline
	@touch $@

$(NODE_DIR)/.build/.made: $(NODE_DIR)/node_modules/.installed $(NODE_DIR)/tsconfig.json $(NODE_SOURCES)
	cd $(NODE_DIR) && node_modules/.bin/tsc -p tsconfig.json
	@touch $@
