# The dev profile is optimized (see Cargo.toml), so that tests run fast without the long link of a release build.
.PHONY: test lint

test:
	cargo test --workspace --no-fail-fast

lint:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps
