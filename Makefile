# Everything happens in .venv, which the first command makes; see CONTRIBUTING.md.

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
REQUIREMENTS := pyproject.toml constraints.txt scripts/install.sh

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test lint format constraints clean

help:
	@echo "make demo          train an agent to fix bugs, evaluate it, and show what came out (a few minutes)"
	@echo "make test          run the whole test suite; PYTEST='-k packing' gives pytest more options"
	@echo "make install       only make $(VENV), with the command $(BIN)/agentrl"
	@echo "make lint          check style and types"
	@echo "make format        format the code"
	@echo "make constraints   pin what pip chooses now as the versions that everybody gets"
	@echo "make clean         remove $(VENV) and what tools leave behind; runs/ stays"
	@echo
	@echo "PYTHON=/path/to/python3.11 chooses the Python; TRAIN='--seed 1' gives the demo's training more options."

install: $(INSTALLED)

$(INSTALLED): $(REQUIREMENTS)
	@scripts/install.sh $@

# It makes the other stamp too; where both are wanted at once, the script lets one wait.
$(INSTALLED_DEV): $(REQUIREMENTS)
	@scripts/install.sh $@ dev

demo: $(INSTALLED)
	@run=runs/demo-$$(date +%Y%m%d-%H%M%S) && \
	$(BIN)/agentrl train --run-dir $$run $(TRAIN) && \
	if $(BIN)/agentrl report --help >/dev/null 2>&1; then $(BIN)/agentrl report $$run; fi

test: $(INSTALLED_DEV)
	@$(BIN)/python -m pytest -q -n 2 $(PYTEST)

lint: $(INSTALLED_DEV)
	@failed=0; \
	$(BIN)/ruff check || failed=1; \
	$(BIN)/ruff format --check || failed=1; \
	$(BIN)/pyright --pythonpath $(BIN)/python || failed=1; \
	exit $$failed

format: $(INSTALLED_DEV)
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

constraints: $(INSTALLED_DEV)
	@{ grep '^#' constraints.txt; \
	$(BIN)/python -m pip freeze --all --exclude pip --exclude agentrl | sed 's/+.*//' | LC_ALL=C sort -f; } \
	> constraints.part && mv constraints.part constraints.txt

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -prune -exec rm -rf {} +
