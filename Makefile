# `make demo`, `make test` and `make check` set up all they need; nothing has to be run before them.
VENV   := .venv
BIN    := $(VENV)/bin
ENGINE ?= sim
READY  := $(VENV)/.ready

.PHONY: demo test check format clean

demo: $(READY)
	$(BIN)/ppd demo --engine $(ENGINE) $(if $(MODEL),--model $(MODEL)) $(if $(ONCE),--once)

# Quick tests first: a broken rule shows in seconds, not after the engines have started.
test: $(READY)
	$(MAKE) --no-print-directory check
	$(BIN)/python -m pytest -m "e2e or wheel"
	$(BIN)/python -m pytest -m vllm

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "not e2e and not wheel and not vllm"

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(READY): pyproject.toml
	test -x $(BIN)/python || python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
