VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
EXTRAS := hf,evolve,ray,plots,serve,demo,test,lint

# Where benchmarks find trained models and data; bin directories (and a python) of programs to compare with.
ZOO ?= $(or $(MERGANSER_ZOO),$(HOME)/.cache/merganser/zoo)
DATA ?= $(or $(MERGANSER_DATA),../shared/data)
MERGEKIT ?=
FUSIONBENCH ?=
PY_IRT ?=
RESULTS := benchmarks/results
QUICK := multi_task compression theory mergeability adaptive evolve single_task_extras peers \
  lowrank alignment irt taskvectors merge_speed
BENCH = MERGANSER_ZOO=$(ZOO) MERGANSER_DATA=$(DATA) $(BIN)/python -m

.PHONY: demo test lint format results readme bench bench-quick clean

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

results: $(VENV)/.installed
	$(BIN)/python -m benchmarks.report
	$(BIN)/python -m benchmarks.readme

readme: results

# Every benchmark on the models of ZOO, trained there if they are missing (a night); programs of PEERS are compared with.
bench: $(VENV)/.installed
	$(BENCH) benchmarks.single_task --arch mlp --dataset mnist --json $(RESULTS)/single_task_mlp.json
	for arch in resnet20-bn resnet20-ln vgg16; do \
	  $(BENCH) benchmarks.single_task --arch $$arch --dataset cifar10 --seeds 0 1 2 --json $(RESULTS)/single_task_$$arch.json || exit; \
	done
	for name in single_task_extras multi_task compression adaptive theory mergeability evolve \
	  lowrank alignment; do \
	  $(BENCH) benchmarks.$$name --json $(RESULTS)/$$name.json || exit; \
	done
	$(BENCH) benchmarks.evolve --models questions --json $(RESULTS)/evolve_language.json
	$(BENCH) benchmarks.irt $(PY_IRT:%=--py-irt %) --json $(RESULTS)/irt.json
	$(BENCH) benchmarks.taskvectors --json $(RESULTS)/taskvectors.json
	$(BENCH) benchmarks.merge_speed $(MERGEKIT:%=--mergekit %) --json $(RESULTS)/merge_speed.json
	$(BENCH) benchmarks.peers $(MERGEKIT:%=--mergekit %) $(FUSIONBENCH:%=--fusionbench %) --json $(RESULTS)/peers.json
	$(if $(MERGEKIT),$(BENCH) benchmarks.parity --mergekit $(MERGEKIT) --json $(RESULTS)/parity.json)
	$(MAKE) results

# The same programs on little, with a trained ZOO in a quarter of an hour: results and their page in bench-quick/.
bench-quick: $(VENV)/.installed
	for name in $(QUICK); do $(BENCH) benchmarks.$$name --quick --json bench-quick/results/$$name.json || exit; done
	$(BENCH) benchmarks.single_task --quick --json bench-quick/results/single_task_mlp.json
	$(BIN)/python -m benchmarks.report --results bench-quick/results --out bench-quick
	@echo "bench-quick/results.md shows what was measured"

clean:
	rm -rf $(VENV) build dist demo-output bench-quick .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps timm # its torchvision has no CPU build to match
	touch $@
