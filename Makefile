# Two commands on a fresh machine with Python 3.11, make and git: `make demo` and `make test`. Each installs first.

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed

.PHONY: help install demo test check slow faults gpu models lint docs site first-hour coverage bench-convert bench-train bench-save bench-load bench-checkpointer bench-inference bench-coverage bench-scale clean

help:
	@echo "make install   a virtual environment in $(VENV), with what was tested"
	@echo "make demo      fine-tune, convert, evaluate and generate with a real model, in a few minutes"
	@echo "make test      lint, types, and the tests that take seconds: ten minutes"
	@echo "make check     what CI runs: the same with all tests but the slow ones (half an hour)"
	@echo "make slow      the tests that take longer: sweeps, tutorials, benchmarks on tiny models (up to 40 minutes)"
	@echo "make faults    kills, power cuts, failing disks, hostile files: many more than in make check (20 to 40 minutes)"
	@echo "make gpu       the checks that need a GPU, in ten minutes, also without $(VENV); GPU_WHEELS=DIR has what is missing"
	@echo "make models    dispatch each of MODELS=DIR:DIR under every map, against transformers (minutes for each)"
	@echo "make lint      repair formatting, and what ruff can"
	@echo "make docs      write docs/config.md anew from the settings in the code"
	@echo "make site      the documentation as a site, in build/site"
	@echo "make first-hour  run the commands of docs/first-hour.md with MODEL=DIR TEXT=FILE, and write what they print"
	@echo "make coverage  the tests again, with the lines that none of them runs"
	@echo "make bench-convert  conversions against cp and other libraries, in WORK (needs 30 GB and a quiet machine)"
	@echo "make bench-train    training against a bare loop and other trainers, in WORK; MODEL=DIR adds a real model"
	@echo "make bench-save  what a save costs training, against plain copies, plain writes and torch, in WORK (needs 10 GB)"
	@echo "make bench-checkpointer  kills, flipped bits and costs in a loop of one's own, against other savers, in WORK (half an hour)"
	@echo "make bench-load  filling a model that is sharded already, against torch and transformers, in WORK (needs 2 GB)"
	@echo "make bench-scale  saving, opening and resuming at 64 to 1,024 simulated ranks, in WORK (files with holes; an hour)"
	@echo "make bench-coverage  every architecture of transformers: built, sharded, trained; goes on where it was stopped, in WORK"
	@echo "make bench-inference  text from checkpoints, against transformers, accelerate and torch, in WORK (needs 25 GB)"
	@echo "make clean     remove $(VENV) and everything made"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt scripts/install
	@PYTHON="$(PYTHON)" VENV="$(VENV)" scripts/install

demo: $(STAMP)
	@$(VENV)/bin/python demo/run.py

test: $(STAMP)
	@scripts/check -m "not slow and not long"

check: $(STAMP)
	@scripts/check

slow: $(STAMP)
	@VENV="$(VENV)" scripts/test -n 2 --dist worksteal --timeout 1500 -m slow

faults: $(STAMP)
	@FAULTS=long $(VENV)/bin/python -m pytest -q -s --timeout 1500 tests/faults tests/end_to_end/test_own_loop.py

# On a machine that is there for its GPU: no install, no network. $(VENV) is used if there is one and PYTHON is not given.
gpu:
	@PYTHON="$(if $(and $(filter file,$(origin PYTHON)),$(wildcard $(VENV)/bin/python)),$(VENV)/bin/python,$(PYTHON))" \
		GPU_WHEELS="$(GPU_WHEELS)" scripts/gpu

models: $(STAMP)
	@test -n "$(MODELS)" || { echo "make models needs MODELS=DIR:DIR, directories of models to dispatch" >&2; exit 2; }
	@MODELS="$(MODELS)" $(VENV)/bin/python -m pytest -q --timeout 900 tests/inference/test_families.py -k real

lint: $(STAMP)
	@scripts/lint

site: $(STAMP)
	@$(VENV)/bin/mkdocs build --strict

docs: $(STAMP)
	@$(VENV)/bin/python -m fsdp_shard.config.reference > docs/config.md && echo "docs/config.md is written"

first-hour: $(STAMP)
	@test -n "$(MODEL)" -a -n "$(TEXT)" || { echo "make first-hour needs MODEL=DIR TEXT=FILE" >&2; exit 2; }
	@$(VENV)/bin/python -m tests.support.transcript docs/first-hour.md --copy "$(MODEL)=llama" "$(TEXT)=jargon.txt"

coverage: $(STAMP)
	@scripts/coverage

bench-coverage: $(STAMP)
	@$(VENV)/bin/python benchmarks/coverage.py --work "$(WORK)/coverage"

bench-inference: $(STAMP)
	@$(VENV)/bin/python benchmarks/inference.py --work "$(WORK)"

WORK ?= build/bench

bench-convert: $(STAMP)
	@$(VENV)/bin/python benchmarks/convert.py --work "$(WORK)"

bench-train: $(STAMP)
	@$(VENV)/bin/python benchmarks/train.py --work "$(WORK)" $(if $(MODEL),--model "$(MODEL)")

bench-save: $(STAMP)
	@$(VENV)/bin/python benchmarks/save.py --work "$(WORK)"

bench-checkpointer: $(STAMP)
	@$(VENV)/bin/python benchmarks/checkpointer.py --work "$(WORK)/checkpointer"

bench-load: $(STAMP)
	@$(VENV)/bin/python benchmarks/load.py --work "$(WORK)"

bench-scale: $(STAMP)
	@$(VENV)/bin/python benchmarks/scale.py --work "$(WORK)/scale"

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage*
