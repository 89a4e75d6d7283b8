PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test clean

demo: .venv/installed-export
	$(BIN)/dflash demo

test: .venv/installed-test .venv/chat-templates
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest

clean:
	rm -rf .venv dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

.venv/created:
	$(PYTHON) -m venv .venv
	touch $@

# The chat templates of published models, as files of a package; its dependencies are many, and no test imports it.
.venv/chat-templates: .venv/created
	$(BIN)/pip install --no-deps trl==1.16.0
	touch $@

# The stamp of an extra is renewed when the list of packages changes.
.venv/installed-%: pyproject.toml .venv/created
	$(BIN)/pip install --editable '.[$*]'
	touch $@
