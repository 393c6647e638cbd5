# Each target is what it says; `make` alone lists them.
.DEFAULT_GOAL := help

# Tests and the demo build network namespaces: as root, or by sudo around the built programs
# alone, so that nothing in target/ comes to belong to root.
ifneq ($(shell id -u),0)
SUDO := sudo --preserve-env
export CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER := $(SUDO)
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER := $(SUDO)
endif

# How long each fuzz target runs, in seconds.
FUZZ_SECONDS ?= 60

# The network plugin of `make conformance`: reference or skein.
export CNI ?= reference

.PHONY: help setup demo test lint check fuzz bench clean-lab test-matrix test-long deny test-cluster conformance

help: ## Lists the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 22

setup: ## Installs what the build and the tests need (Debian, Ubuntu)
	@deploy/setup.sh

demo: setup ## Brings two nodes up, shows pods talking through the datapath, tears down
	cargo build --release --workspace --bins
	$(SUDO) target/release/skein-lab demo

test: setup lint check fuzz ## Everything: lints, unit, property, namespace and end-to-end tests, fuzzing

lint: ## Formatting and clippy, warnings denied
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings

check: ## Unit, property, simulation, namespace and end-to-end tests
	cargo test --workspace

fuzz: ## The fuzz targets, FUZZ_SECONDS each, on the stable toolchain
	SKEIN_FUZZ_SECONDS=$(FUZZ_SECONDS) cargo test --release --manifest-path dataplane/fuzz/Cargo.toml

test-matrix: setup ## The end-to-end tests in every combination of fall-backs and XDP modes (hours)
	@for disable in "" multi-buffer tx-metadata multi-buffer,tx-metadata; do \
	  for uplink in native generic; do for pods in generic native; do \
	    echo "== uplink $$uplink, pods $$pods, without: $${disable:-nothing}"; \
	    env $${disable:+SKEIN_DEBUG_DISABLE=$$disable} SKEIN_UPLINK_XDP_MODE=$$uplink \
	      SKEIN_PODS_XDP_MODE=$$pods cargo test --workspace --test 'e2e_*' || exit 1; \
	  done; done; \
	done

test-long: setup ## 250 pods, thousands of ADDs and DELs, a hundred crashes (half an hour)
	cargo build --workspace --bins
	SKEIN_LONG=1 cargo test -p skein-perf --test e2e_many --test e2e_crash -- --nocapture

test-cluster: setup ## A real Kubernetes out of namespaces and some of its own tests (needs Go 1.26)
	deploy/cluster/setup.sh
	cargo build --workspace --bins
	cargo clippy -p skein-perf --test cluster -- -D warnings
	programs=$$(deploy/cluster/build.sh) && SKEIN_CLUSTER_PROGRAMS=$$programs \
	  cargo test --workspace --test cluster -- --nocapture

conformance: setup ## All of Kubernetes' network conformance tests; docs/conformance.md (needs Go 1.26)
	deploy/cluster/setup.sh
	cargo build --release --workspace --bins
	programs=$$(deploy/cluster/build.sh) && SKEIN_CLUSTER_PROGRAMS=$$programs SUDO="$(SUDO)" \
	  deploy/cluster/conformance.sh

bench: setup ## cargo bench, then the lab's benchmarks beside the kernel's own (perf/results)
	cargo build --release --workspace --bins
	cargo bench -p skein-benches
	$(SUDO) target/release/skein-lab bench

deny: ## Licences and advisories of all dependencies (needs cargo-deny)
	cargo deny check

clean-lab: ## Removes what a lab left that was killed
	$(SUDO) target/release/skein-lab gc
