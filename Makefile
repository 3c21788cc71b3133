# make quickstart   makes a small image from this machine's tools, pulls, mounts and runs it twice
# make test         everything that must hold: lint, then all tests, with real components
# make test-long    the same with long loops of the fuzzers
# make lint         ruff, mypy --strict, the import contracts
# make bench        the benchmarks, into docs/results (make bench QUICK=1: a fast look)
# make lock         renews the lock files from pyproject.toml

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
QUICK ?=

.PHONY: quickstart test test-long lint bench lock clean

quickstart: $(VENV)/runtime
	@$(BIN)/python examples/quickstart.py

test: lint
	$(BIN)/python -m pytest

test-long: lint
	SNAPSHOTTER_LONG=1 $(BIN)/python -m pytest --timeout 3600

lint: $(VENV)/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/dev
	$(BIN)/python -m benchmarks run $(if $(QUICK),--quick)

$(VENV)/runtime: requirements.lock pyproject.toml
	@scripts/install-debian-packages run
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

$(VENV)/dev: $(VENV)/runtime requirements-dev.lock
	@scripts/install-debian-packages run test
	@$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev.lock
	@touch $@

lock: $(VENV)/dev
	$(BIN)/pip install --quiet pip-tools
	$(BIN)/pip-compile --quiet --generate-hashes --strip-extras --no-header \
	    --no-emit-index-url --no-emit-find-links --extra containerd \
	    -o requirements.lock pyproject.toml
	$(BIN)/pip-compile --quiet --generate-hashes --strip-extras --no-header \
	    --no-emit-index-url --no-emit-find-links --extra containerd --extra dev \
	    -o requirements-dev.lock pyproject.toml

clean:
	rm -rf $(VENV) .quickstart .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
