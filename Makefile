VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
EXTRAS := hf,evolve,ray,plots,serve,demo,test,lint

.PHONY: demo test lint format readme bench clean

demo: $(VENV)/.installed
	$(BIN)/merganser demo --out demo-output --overwrite

test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

readme: $(VENV)/.installed
	$(BIN)/python -m benchmarks.readme

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks.merge_speed
	$(BIN)/python -m benchmarks.lowrank
	$(BIN)/python -m benchmarks.alignment

clean:
	rm -rf $(VENV) build dist demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps timm # its torchvision has no CPU build to match
	touch $@
