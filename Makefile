PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test clean

demo: .venv/installed-export
	$(BIN)/dflash demo

test: .venv/installed-test
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest

clean:
	rm -rf .venv dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

.venv/created:
	$(PYTHON) -m venv .venv
	touch $@

# The stamp of an extra is renewed when the list of packages changes.
.venv/installed-%: pyproject.toml .venv/created
	$(BIN)/pip install --editable '.[$*]'
	touch $@
