# The dev profile is optimized (see Cargo.toml), so that tests run fast without the long link of a release build.
MAKEFLAGS += --jobs=$(shell nproc)
.PHONY: test lint kernels emulator python sglang attack

# Of the Python package, of what writes GGUF files for tests/gguf.rs, and of what chat templates are held against.
PYTHON = target/python/bin

test: emulator
	$(MAKE) $(PYTHON)/maturin || echo "no PyPI: what Python runs is skipped"
	scripts/test

# The kernels compiled for the CPU behind the CUDA driver's interface. GPU tests use it on machines without a GPU.
EMULATOR = target/emulator
# Shared memory is thread-local, and the two flags in front of -DEMULATED make it and calls within the library cheap.
EMULATOR_FLAGS = -std=c++17 -O2 -march=x86-64-v3 -fPIC -fno-semantic-interposition -mtls-dialect=gnu2 -DEMULATED \
	-Ikernels -Wno-unknown-pragmas -Wno-ignored-attributes -Wno-psabi
KERNELS = $(patsubst kernels/%.cu,$(EMULATOR)/%.o,$(wildcard kernels/*.cu))

emulator: $(EMULATOR)/libcuda.so.1

$(EMULATOR)/libcuda.so.1: $(KERNELS) $(EMULATOR)/threads.o $(EMULATOR)/driver.o
	g++ -shared -Wl,-soname,libcuda.so.1,-Bsymbolic $^ -o $@ -lpthread

$(EMULATOR)/%.o: kernels/%.cu $(wildcard kernels/*.cuh) kernels/emulator/device.h
	@mkdir -p $(EMULATOR)
	g++ $(EMULATOR_FLAGS) -x c++ -c $< -o $@

$(EMULATOR)/%.o: kernels/emulator/%.cc kernels/emulator/device.h kernels/emulator/threads.h
	@mkdir -p $(EMULATOR)
	g++ $(EMULATOR_FLAGS) -c $< -o $@

# Compiles the kernels, for $CUDAARCHS, and fails where one spills.
kernels:
	scripts/kernel-resources

# Fuzz targets take the workspace's versions, most of which are checked by then. libFuzzer itself is not compiled:
# nothing is linked.
lint:
	scripts/same-features
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	cp Cargo.lock fuzz/
	CUSTOM_LIBFUZZER_PATH=none/libfuzzer.a cargo check --manifest-path fuzz/Cargo.toml --target-dir target
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps
	$(MAKE) $(PYTHON)/maturin || true
	@[ -x $(PYTHON)/clang-format ] || echo "no PyPI: the layout of kernels is not checked"
	[ ! -x $(PYTHON)/clang-format ] || $(PYTHON)/clang-format --dry-run --Werror \
		$(wildcard kernels/*.cu kernels/*.cuh kernels/emulator/*.cc kernels/emulator/*.h)

# The Python package: builds a wheel with the tests' profile, installs it into target/python, and runs its tests.
python: $(PYTHON)/maturin
	rm -rf target/wheels
	PATH="$(CURDIR)/$(PYTHON):$$PATH" $(PYTHON)/maturin build --manifest-path python/Cargo.toml --profile dev \
		--out target/wheels
	$(PYTHON)/pip install --quiet --force-reinstall --no-deps target/wheels/moebius-*.whl
	$(PYTHON)/pytest -q python/tests

$(PYTHON)/maturin:
	python3 -m venv target/python
	$(PYTHON)/pip install --quiet clang-format==23.1.5 gguf jinja2 maturin mypy numpy pytest

# Whole SGLang servers on a GPU: with Moebius's experts, beside all experts on the GPU. Skipped by name elsewhere.
# $(SGLANG) is a Python with both: pip install sglang ./python
SGLANG = python3
SGLANG_FLAGS =

sglang:
	$(SGLANG) python/tests/whole_sglang.py -- $(SGLANG_FLAGS)

# What a hostile client, model, hub or disk might do, against a release build; the report is target/attack/report.md.
MINUTES = 30
SEED = 1
ONLY =

attack:
	cargo build --release
	python3 tests/attack --minutes $(MINUTES) --seed $(SEED) --only "$(ONLY)"
