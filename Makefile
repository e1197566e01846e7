# make serve   build Noria, pull the default model on first use, serve it      (MODEL=... PORT=... ARGS='--flag value')
# make test    install the test extra and run the whole suite                  (ARGS='-k name')
# make check   format, lint, strict types, import rules, quick tests
# make bench   the workloads in process, beside bench/baseline.json            (MODEL=... ARGS='--only w1', ARGS=--record)
# make develop build in place for editing: the sources under src/ are what runs

PYTHON ?= python3
VENV   ?= .venv
MODEL  ?= smollm2-135m
PORT   ?= 8000
ARGS   ?=
BIN    := $(VENV)/bin

SOURCES := pyproject.toml CMakeLists.txt $(shell find src native -type f -not -name '*.pyc' -not -name '*.so')

.PHONY: serve test check format bench develop clean

serve: $(VENV)/.installed
	exec $(BIN)/noria serve $(MODEL) --port $(PORT) $(ARGS)

test: $(VENV)/.tested
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.checked
	$(BIN)/ruff format --check src tests tools
	$(BIN)/ruff check src tests tools
	$(BIN)/clang-format --dry-run --Werror native/*.h native/*.cpp
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

format: $(VENV)/.checked
	$(BIN)/ruff format src tests tools
	$(BIN)/ruff check --fix src tests tools
	$(BIN)/clang-format -i native/*.h native/*.cpp

bench: $(VENV)/.installed
	$(BIN)/noria bench baseline $(MODEL) $(ARGS)

develop: $(VENV)/bin/python
	$(BIN)/pip install --quiet "scikit-build-core>=0.10" "nanobind>=2.4" cmake ninja
	$(BIN)/pip install --quiet --no-build-isolation -e ".[test,dev]"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip

$(VENV)/.installed: $(VENV)/bin/python $(SOURCES)
	$(BIN)/pip install --quiet .
	touch $@

# torch first and pinned, so that nothing that depends on it brings another build
$(VENV)/.torch: $(VENV)/bin/python
	$(BIN)/pip install --quiet "torch==2.13.0"
	touch $@

$(VENV)/.tested: $(VENV)/.torch $(VENV)/.installed
	$(BIN)/pip install --quiet ".[test]"
	touch $@

$(VENV)/.checked: $(VENV)/.tested
	$(BIN)/pip install --quiet ".[test,dev]"
	touch $@

clean:
	rm -rf build dist $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
