# `make serve` and `make test` do all the set-up on a fresh machine: Debian's python3, venv and make are enough.
PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
# A checkpoint folder for `make serve`; empty: the bundled demo model.
MODEL  ?=
# Processes that share a test run; tests that share a cluster stay in one of them.
TEST_PROCESSES ?= 2
# Extra words for the torch install, e.g. PIP_TORCH_ARGS="--index-url <your mirror of CPU or CUDA wheels>".
PIP_TORCH_ARGS ?=
# Extra words for the install of what `make gpu` needs, e.g. PIP_GPU_ARGS="--no-index --find-links wheels".
PIP_GPU_ARGS ?=
# Which images `make images` builds; how is by the variables that deploy/docker/build.sh names.
IMAGES ?= proxy worker-cpu
# A container's wish not to write bytecode would have every process of every test compile the product again.
unexport PYTHONDONTWRITEBYTECODE
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PACKAGES := $(VENV)/.packages
TOOLS  := .tools
PYTEST := $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadscope --no-loadscope-reorder

.PHONY: serve check generated install-proxy test test-unit test-slow test-transformers test-vllm test-load-tools load-tools structured-clients gpu tools images lint proto client openapi bench dist install clean

define new_venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "Python %s is too old: install 3.11 or newer and say PYTHON=python3.11" % sys.version.split()[0])'
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "python3-venv is missing: apt-get install python3-venv"; exit 2; }
	$(PYTHON) -m venv $(VENV)
endef

$(PACKAGES): pyproject.toml triptych_bench/pyproject.toml constraints.txt
	$(new_venv)
	$(BIN)/pip install -q $(PIP_TORCH_ARGS) "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python deploy/docker/requirements.py dev > $(VENV)/dev.txt
	$(BIN)/pip install -q -c constraints.txt -e ".[worker,embedded,ray,cert,client,top,doctor,otel]" -e triptych_bench -r $(VENV)/dev.txt
	touch $@

$(STAMP): $(PACKAGES) $(wildcard triptych/kernels/*.cpp triptych/kernels/*.h)
	$(BIN)/python -m triptych.kernels.library
	touch $@

install: $(STAMP)

# Enough for work in proxy/: no torch, no ray.
$(VENV)/.proxy: pyproject.toml constraints.txt
	$(new_venv)
	$(BIN)/python deploy/docker/requirements.py dev-proxy > $(VENV)/dev-proxy.txt
	$(BIN)/pip install -q -c constraints.txt -e ".[embedded,otel,client,top,doctor]" -r $(VENV)/dev-proxy.txt
	touch $@

install-proxy: $(VENV)/.proxy

# The unit tests that name a module, in seconds: make check FILE=proxy/routing.py
FILE ?=
check: $(if $(wildcard $(VENV)/.proxy),$(VENV)/.proxy,$(STAMP))
	@test -f "$(FILE)" || { echo "give a module of the product: make check FILE=proxy/routing.py"; exit 2; }
	$(BIN)/ruff check $(FILE)
	$(BIN)/ruff format --check $(FILE)
	units=$$($(BIN)/python tests/tools/tests_of.py $(FILE)) && \
	  $(BIN)/python -m pytest -q -n0 -m "not slow and not gpu" $(ARGS) $$units

serve: $(STAMP)
	@exec $(BIN)/triptych serve $(MODEL) $(ARGS)

test: $(STAMP)
	$(PYTEST) -m "not slow and not gpu" $(ARGS)

test-unit: $(STAMP)
	$(PYTEST) tests/unit -m "not slow and not gpu" $(ARGS)

$(VENV)/.clients: $(PACKAGES)
	$(BIN)/python deploy/docker/requirements.py clients > $(VENV)/clients.txt
	$(BIN)/pip install -q -c constraints.txt -r $(VENV)/clients.txt
	touch $@

# Clients that ask for structured output, each in an environment of its own.
STRUCTURED_CLIENTS := anthropic instructor openai-agents pydantic-ai
structured-clients: $(STRUCTURED_CLIENTS:%=$(TOOLS)/%/.installed)

# Programs of Debian that slow tests drive: a Redis with TLS and Cluster, Prometheus, promtool, chromium. Needs no root.
tools: $(TOOLS)/bin/promtool $(TOOLS)/bin/chromium

$(TOOLS)/bin/promtool: tests/tools/unpack.sh
	sh tests/tools/unpack.sh $(TOOLS)
	touch $@

$(TOOLS)/bin/chromium: tests/tools/unpack_browser.sh
	sh tests/tools/unpack_browser.sh $(TOOLS)
	touch -h $@

# Container images by docker, podman or buildah; where packages come from is IMAGE_BUILD_ARGS' business.
images: export IMAGE_BUILD_ARGS := $(IMAGE_BUILD_ARGS)
images: export PIP_TORCH_ARGS := $(PIP_TORCH_ARGS)
images:
	sh deploy/docker/build.sh $(IMAGES)

# torchvision beside our packages, for the classes whose processors are on it only.
$(TOOLS)/torchvision/.installed: $(PACKAGES) tests/tools/torchvision.sh tests/tools/vllm_shims.py
	PYTHON=$(BIN)/python sh tests/tools/torchvision.sh $(TOOLS)/torchvision

# Triton, for tests of its kernels without a GPU.
$(TOOLS)/triton/.installed: $(PACKAGES)
	$(BIN)/pip install -q --no-deps --target $(TOOLS)/triton "$$(grep -o 'triton==[0-9.]*' pyproject.toml)"
	touch $@

# The classes of another release of transformers than the pinned one, which is also the oldest that is asked for.
TRANSFORMERS ?= 5.24.0
test-transformers: $(STAMP)
	PYTHON=$(BIN)/python sh tests/tools/torchvision.sh $(TOOLS)/transformers-$(TRANSFORMERS) transformers==$(TRANSFORMERS)
	$(TOOLS)/transformers-$(TRANSFORMERS)/venv/bin/python -m pytest -n 0 -p no:cacheprovider $(ARGS) \
	  $(addprefix tests/integration/zoo/,test_classes.py test_matrix.py test_own_processors.py)

test-slow: $(VENV)/.clients structured-clients $(TOOLS)/bin/promtool $(TOOLS)/bin/chromium $(TOOLS)/torchvision/.installed \
		$(TOOLS)/triton/.installed
	$(PYTEST) -m "not gpu and not vllm and not load_tools" $(ARGS)
	PYTHONPATH=$(TOOLS)/triton $(BIN)/python -m pytest tests/triton_kernels -n 0 $(ARGS)

# vLLM's CPU build in an environment of its own: our connector inside it, fed by our encoder worker.
$(TOOLS)/vllm/.installed: tests/tools/vllm.sh tests/tools/vllm_requirements.py tests/tools/vllm_shims.py constraints.txt
	PYTHON=$(PYTHON) PIP_TORCH_ARGS="$(PIP_TORCH_ARGS)" sh tests/tools/vllm.sh $(TOOLS)/vllm

test-vllm: $(STAMP) $(TOOLS)/vllm/.installed
	$(BIN)/python -m pytest tests/with_vllm -m vllm -n 0 $(ARGS)

# Other people's load tools, and lmms-eval, each in an environment of its own, against a cluster of ours on loopback.
LOAD_TOOLS := guidellm aiperf inference-perf lmms-eval
load-tools: $(LOAD_TOOLS:%=$(TOOLS)/%/.installed)

$(LOAD_TOOLS:%=$(TOOLS)/%/.installed) $(STRUCTURED_CLIENTS:%=$(TOOLS)/%/.installed): \
		$(TOOLS)/%/.installed: $(PACKAGES) tests/tools/load_tool.sh
	PYTHON=$(BIN)/python sh tests/tools/load_tool.sh $(TOOLS) $*

test-load-tools: $(STAMP) load-tools $(TOOLS)/vllm/.installed
	$(BIN)/python -m pytest tests/with_load_tools -m load_tools -n 0 $(ARGS)

# On a machine with a GPU, in an image that has torch for it: PYTHON is that image's. Writes benchmarks/results/gpu.md.
.venv-gpu/.installed: tests/gpu/requirements.txt
	$(PYTHON) benchmarks/gpu/find_torch.py
	$(PYTHON) -m venv --system-site-packages .venv-gpu
	.venv-gpu/bin/pip install -q $(PIP_GPU_ARGS) -r tests/gpu/requirements.txt
	touch $@

gpu: .venv-gpu/.installed
	.venv-gpu/bin/python -m benchmarks.gpu $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	BIN=$(BIN) sh protos/check.sh
	$(BIN)/python tests/tools/sync_client.py --check

proto: $(STAMP)
	BIN=$(BIN) sh protos/generate.sh

# The blocking client, from the one for asyncio.
client: $(STAMP)
	$(BIN)/python tests/tools/sync_client.py

# The API's description that the proxy serves.
openapi: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m support.openapi

# Everything that is generated and committed: stubs, the blocking client, the API's description, tables of docs/.
generated: $(if $(wildcard $(VENV)/.proxy),$(VENV)/.proxy,$(STAMP))
	BIN=$(BIN) sh protos/generate.sh
	$(BIN)/python tests/tools/sync_client.py
	PYTHONPATH=tests $(BIN)/python -m support.openapi
	TRIPTYCH_WRITE_CLI=1 TRIPTYCH_WRITE_METRICS=1 TRIPTYCH_WRITE_QUOTAS=1 $(BIN)/python -m pytest -q -n0 \
	  -k "shows_the_table or table_is_that_of_the_registries or every_command_and_option" \
	  tests/unit/docs/test_command_line.py tests/unit/docs/test_pages.py \
	  tests/security/tenants/test_quotas.py tests/security/fairness/test_budgets.py
	$(BIN)/python tests/tools/promises.py

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(ARGS)

# A release in dist/: wheels of triptych and triptych-bench, the source archive, the chart's package, SHA256SUMS.
dist: $(PACKAGES)
	rm -rf dist
	$(BIN)/python deploy/distributions.py dist

clean:
	rm -rf $(VENV) $(TOOLS) .venv-gpu
