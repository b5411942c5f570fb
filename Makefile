# make run    train a small chat model on two processes, from nothing
# make test   unit and functional tests
# make layouts  every layout against the oracle, in all precisions (make test: a part that covers each pair of features)
# make check  format, lint, types

PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.10; do $$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
# As many GPUs as there are, two at most; two CPU processes where there is none.
NPROC ?= $(shell test "$$(nvidia-smi -L 2>/dev/null | grep -c GPU)" = 1 && echo 1 || echo 2)
TINY_CHAT = data/tiny_chat
CODE = megatron tests examples pretrain_sft.py setup.py
# Two processes on two cores: more threads each would only wait for one another.
export OMP_NUM_THREADS ?= 1

.PHONY: run test layouts check format clean
.DELETE_ON_ERROR:

run: $(VENV)/.run $(TINY_CHAT)/train.jsonl
	rm -rf runs/tiny_chat
	$(VENV)/bin/torchrun --nproc-per-node $(NPROC) pretrain_sft.py --config examples/tiny_chat/config.yaml --save-hf runs/tiny_chat/huggingface

# Apart: functional tests fork their ranks, which a process full of other libraries' threads is no good parent for.
test: $(VENV)/.dev
	$(VENV)/bin/pytest tests/unit_tests
	$(VENV)/bin/pytest tests/functional_tests

layouts: $(VENV)/.dev
	LAYOUTS=all $(VENV)/bin/pytest tests/functional_tests/test_layouts.py tests/functional_tests/test_precision.py

check: $(VENV)/.dev
	$(VENV)/bin/ruff format --check $(CODE)
	$(VENV)/bin/ruff check $(CODE)
	$(VENV)/bin/mypy $(CODE)

format: $(VENV)/.dev
	$(VENV)/bin/ruff format $(CODE)
	$(VENV)/bin/ruff check --fix $(CODE)

$(TINY_CHAT)/train.jsonl: examples/tiny_chat/make_data.py | $(VENV)/.run
	$(VENV)/bin/python $< --output-dir $(TINY_CHAT)

$(VENV)/.torch:
	@test -n "$(PYTHON)" || { echo "Python 3.10, 3.11 or 3.12 is needed; pass one: make run PYTHON=/path/to/python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	touch $@

$(VENV)/.run: setup.py | $(VENV)/.torch
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --editable '.[plot]'
	touch $@

$(VENV)/.dev: setup.py | $(VENV)/.torch
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $(VENV)/.run $@

clean:
	rm -rf $(VENV) data runs *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
