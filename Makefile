# Two commands do everything on a fresh machine: `make serve` and `make test`.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' && echo $$p && break; done)
TORCH ?= torch==2.13.0
# Where the default index carries the CUDA build and no GPU is there, name an index with CPU builds:
#   make serve TORCH_INDEX=URL
TORCH_INDEX ?=
MODEL ?=
SERVE_FLAGS ?=
DEPLOY_FLAGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install serve test check check-types check-kernels format soak clients check-deploy clean

install: $(STAMP)
	@$(BIN)/python -m services.gpu_worker.kernels.build
	@$(BIN)/python -m radixfleet.models $(MODEL)

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "RadixFleet needs Python 3.11 or newer"; exit 1; }
	@test -x $(BIN)/python || { echo "creating $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing $(TORCH) (once, a minute or two)"
	@$(BIN)/pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(TORCH)
	@echo "installing RadixFleet and what it needs"
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[worker,dev]'
	@touch $(STAMP)

serve: install
	@$(BIN)/radixfleet serve $(if $(MODEL),--model-path $(MODEL)) $(SERVE_FLAGS)

test: install
	$(BIN)/pytest

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	@$(MAKE) --no-print-directory -j 2 check-types check-kernels

check-types: $(STAMP)  # one core, a minute the first time
	$(BIN)/mypy

check-kernels: $(STAMP)
	$(BIN)/python scripts/sanitize_kernels.py

# Long trials; run before a release, their last result is committed.
soak: install
	$(BIN)/python scripts/soak.py --minutes 5 --write docs/soak.md
	$(BIN)/python scripts/chaos.py --minutes 5 --write docs/chaos.md
	$(BIN)/python scripts/sanitize_kernels.py --all
	$(BIN)/python scripts/fuzz_door.py

# Builds the images and tries docker-compose.yml with a real engine; starts one of its own where none runs (root).
check-deploy: install
	TORCH="$(TORCH)" TORCH_INDEX="$(TORCH_INDEX)" $(BIN)/python scripts/check_deploy.py --timings $(DEPLOY_FLAGS)

clients: install
	$(BIN)/python scripts/clients.py --write docs/clients.md

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
