# Two commands do everything: `make up` runs the whole of muster here, `make test` tests it.
# Both first create the virtual environment; the second time they start within seconds.
.SUFFIXES:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
COLLECTED := $(VENV)/.collected

# Uncompiled imports double the start time, so compile even where the caller's environment forbids it.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1

KUBERNETES ?= 1.37

# Checks run two at a time; make 4.0 or newer keeps the output of each together.
SYNC := $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)

.PHONY: help up demo test lint types contracts collected unit coverage generate bench fuzz manifests test-compose test-newest cluster cluster-down images test-cluster test-peers lock sbom docs pictures clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"muster needs Python 3.11 or newer; $(PYTHON) is {v[0]}.{v[1]}: make PYTHON=/path/to/python3.11 ...")'
	@echo "==> making the environment in $(VENV) (about half a minute, once)"
	@$(PYTHON) -m venv $(VENV)
	@# uv takes a quarter of pip's time but ignores pip's settings; if it fails, pip installs
	@$(BIN)/pip install --quiet uv && $(BIN)/uv pip install --quiet --python $(BIN)/python --editable '.[dev]' \
	|| $(BIN)/pip install --quiet --editable '.[dev]'
	@$(BIN)/python -m compileall -q muster services
	@touch $@

up: $(STAMP) ## run the whole of muster on this machine, until Ctrl-C (ARGS="--nodes 5 --gpus 2": other nodes)
	@exec $(BIN)/muster up $(ARGS)

demo: $(STAMP) ## play faults, verdicts and notifications on simulated nodes, then exit
	@exec $(BIN)/muster demo

lint: $(STAMP)
	@echo "==> ruff"
	@$(BIN)/ruff format --check --quiet . || { echo "run: $(BIN)/ruff format ."; exit 1; }
	@$(BIN)/ruff check --quiet .

types: $(STAMP)
	@echo "==> mypy"
	@$(BIN)/mypy --no-error-summary

contracts: $(STAMP)
	@echo "==> import contracts, generated files"
	@mkdir -p build
	@$(BIN)/lint-imports --no-cache > build/contracts.log 2>&1 || { cat build/contracts.log; exit 1; }
	@$(BIN)/python scripts/generate.py --check
	@$(BIN)/python scripts/manifests.py --check

# Compile the test files once here, so that not each of the workers below compiles them.
$(COLLECTED): $(STAMP)
	@echo "==> collecting the tests (once)"
	@mkdir -p build
	@$(BIN)/pytest --collect-only -qq > build/collected.log 2>&1 || { cat build/collected.log; exit 1; }
	@touch $@

collected: $(COLLECTED)
	@:

unit: $(STAMP) $(COLLECTED)
	@echo "==> pytest"
	@$(BIN)/pytest -q -n 6 --dist worksteal

test: $(STAMP) ## lint, types, contracts and every test
	@$(MAKE) --no-print-directory --jobs=2 $(SYNC) types lint contracts collected
	@$(MAKE) --no-print-directory unit

coverage: $(STAMP) ## run every test and report line and branch coverage by package
	@rm -rf build/coverage && mkdir -p build/coverage
	@$(BIN)/coverage run -m pytest -q -n 6 --dist worksteal || true
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage json --quiet -o build/coverage.json
	@$(BIN)/python scripts/coverage_table.py build/coverage.json

generate: $(STAMP) ## update the checked-in generated files: protobuf, JSON Schemas, AsyncAPI, the module map
	@$(BIN)/python scripts/generate.py

bench: $(STAMP) ## run every benchmark (more than an hour) and write docs/performance.md
	@$(BIN)/pip install --quiet --editable '.[bench]'
	@$(BIN)/python -m bench

FUZZ_SECONDS ?= 60
fuzz: $(STAMP) ## run every fuzz target for a minute (FUZZ_SECONDS=300: longer); needs Linux on x86-64
	@$(BIN)/pip install --quiet --editable '.[fuzz]'
	@$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS)
	@if command -v clang >/dev/null; then $(MAKE) --no-print-directory -C services/fuse/helper fuzz FUZZ_S=$(FUZZ_SECONDS); \
	else echo "services/fuse/helper is not fuzzed: clang is missing"; fi

manifests: $(STAMP) ## update the generated manifests, then render and validate all of them
	@$(BIN)/python scripts/manifests.py
	@$(BIN)/pytest -q -n 0 $(addprefix tests/pure/test_,$(addsuffix .py,manifests chart rights pod_security upgrade))

test-newest: ## run the tests on the newest Python in Debian; needs root
	@scripts/test-newest

test-compose: $(STAMP) ## build the image, start compose.yaml, play the demo, kill a container, stop everything
	@scripts/test-compose

cluster: $(STAMP) ## start a real Kubernetes cluster of one node on this machine; needs root, Go and apt-get (KUBERNETES=1.34: an older one)
	@$(BIN)/python -m scripts.cluster up --version $(KUBERNETES)

cluster-down: $(STAMP) ## stop it; its programs and images stay in the cache
	@$(BIN)/python -m scripts.cluster down

test-cluster: $(STAMP) ## install muster in that cluster as a user does, and test it there
	@scripts/test-cluster $(KUBERNETES)

test-peers: $(STAMP) ## watch third-party device plugins in that cluster, and inject faults into them
	@scripts/test-cluster $(KUBERNETES) "cluster and peers"

IMAGE = muster
TAG = 0.1.0
images: ## build the images IMAGE (all services) and IMAGE-node (the programs of every node)
	docker build --target services -t $(IMAGE):$(TAG) .
	docker build --target node -t $(IMAGE)-node:$(TAG) .

LOCK = --quiet --universal --generate-hashes --no-annotate --no-header --python-version 3.11
lock: $(STAMP) ## update the locked dependencies of the images
	@$(BIN)/pip install --quiet uv
	@$(BIN)/uv pip compile $(LOCK) --upgrade --extra plugin --extra labeler --extra health --extra notifier --extra console --extra auth pyproject.toml --output-file requirements/services.lock
	@$(BIN)/uv pip compile $(LOCK) --constraint requirements/services.lock --extra plugin --extra fuse --extra creds pyproject.toml --output-file requirements/node.lock
	@$(BIN)/uv pip compile $(LOCK) --constraint requirements/services.lock --extra plugin --extra labeler --extra health --extra notifier --extra console --extra auth --extra local --extra cli pyproject.toml --output-file requirements/laptop.lock

sbom: $(STAMP) ## list the packages in the images as CycloneDX, in build/
	@$(BIN)/python scripts/sbom.py

docs: $(STAMP) ## build the documentation as a site in build/site, which loads nothing from elsewhere
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "to read it, with search: python3 -m http.server --bind 127.0.0.1 --directory build/site"

pictures: $(STAMP) ## make the pictures of the README and docs from a real run; needs tmux and Chromium
	@$(BIN)/python -m scripts.pictures

clean: ## remove the environment and build outputs
	rm -rf $(VENV) build dist
