# make run    train a small chat model on two processes, from nothing
# make test   unit and functional tests
# make layouts  every layout against the oracle, in all precisions (make test: a part that covers each pair of features)
# make test-cpus  the same tests under the instruction sets and thread counts that this processor has
# make check  format, lint, types

PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.10; do $$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
# As many GPUs as there are, two at most; two CPU processes where there is none.
NPROC ?= $(shell test "$$(nvidia-smi -L 2>/dev/null | grep -c GPU)" = 1 && echo 1 || echo 2)
TINY_CHAT = data/tiny_chat
CODE = megatron tests examples pretrain_sft.py setup.py
# Two processes on two cores: more threads each would only wait for one another.
export OMP_NUM_THREADS ?= 1

.PHONY: run test layouts test-cpus check format clean
.DELETE_ON_ERROR:

run: $(VENV)/.run $(TINY_CHAT)/train.jsonl
	rm -rf runs/tiny_chat
	$(VENV)/bin/torchrun --nproc-per-node $(NPROC) pretrain_sft.py --config examples/tiny_chat/config.yaml

# Apart: functional tests fork their ranks, which a process full of other libraries' threads is no good parent for.
test: $(VENV)/.dev
	$(VENV)/bin/pytest tests/unit_tests
	$(VENV)/bin/pytest tests/functional_tests

layouts: $(VENV)/.dev
	LAYOUTS=all $(VENV)/bin/pytest tests/functional_tests/test_layouts.py tests/functional_tests/test_precision.py

# Other processors, as far as one shows them: torch, MKL, oneDNN and numpy keep to older instructions, or to two
# threads. `make test-cpu-oldest` is one setting alone; CPU_TESTS chooses the tests.
CPU_TESTS = tests/unit_tests tests/functional_tests
CPU_oldest = ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41 \
	NPY_DISABLE_CPU_FEATURES='X86_V3 X86_V4 AVX512_ICL AVX512_SPR' OMP_NUM_THREADS=1
CPU_avx2 = ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 \
	NPY_DISABLE_CPU_FEATURES='X86_V4 AVX512_ICL AVX512_SPR' OMP_NUM_THREADS=2
CPU_avx512f = ATEN_CPU_CAPABILITY=avx512 MKL_CBWR=AVX512 ONEDNN_MAX_CPU_ISA=AVX512_CORE OMP_NUM_THREADS=1
CPU_threads = OMP_NUM_THREADS=2
CPUS := oldest $(shell for set in avx2 avx512f; do grep -qw $$set /proc/cpuinfo 2>/dev/null && echo $$set; done) threads

test-cpus: $(addprefix test-cpu-,$(CPUS))
	@echo "passed as on these processors: $(CPUS)"

test-cpu-%: $(VENV)/.dev
	for tests in $(CPU_TESTS); do env $(CPU_$*) $(VENV)/bin/pytest $$tests || exit; done

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
