# List the recipes.
default:
    @{{ just_executable() }} --list --unsorted

# Format the code.
fmt:
    cargo fmt --all

# Run clippy with warnings as errors, on everything and on the program as it goes into an image.
lint:
    cargo clippy --workspace --all-targets --locked -- -D warnings
    cargo clippy -p capstan --no-default-features --locked -- -D warnings

# Run the unit tests: no Go, no cluster.
unit:
    cargo test --workspace --locked --lib --bins

# Run many seeds of the explorer: random faults, crashes, stale reads and edits. EXPLORE_SEED=N replays one seed.
explore SEEDS="300" *ARGS:
    EXPLORE_SEEDS={{ SEEDS }} cargo test --locked -p capstan-explore --lib -- --include-ignored --nocapture {{ ARGS }}

# Run all tests. The first run builds the real parts with Go.
test *ARGS:
    cargo test --workspace --locked {{ ARGS }}

# Run the tests against the controllers that Capstan replaces. There are none yet.
peers:
    cargo test --workspace --locked --test it peers -- --ignored

# Run a benchmark: just bench vsphere --machines 50
bench *ARGS:
    cargo run --release --locked -p capstan-bench -- {{ ARGS }}

# Start a cluster, simulated clouds, the controllers and examples on this machine.
up *ARGS:
    cargo run --release --locked -p capstan -- up {{ ARGS }}

# Write deploy/crds from the types.
crds:
    UPDATE_CRDS=1 cargo test --locked -p capstan-api --test it crds

# Check the dependencies for known vulnerabilities; needs cargo-deny and a network.
advisories:
    cargo deny --locked check advisories

# Write the software bill of materials of the production program, and put it into the binary too.
sbom:
    cargo cyclonedx --format json --no-default-features --manifest-path crates/capstan/Cargo.toml --describe binaries
    cargo auditable build --release --locked -p capstan --no-default-features

# Run everything that must hold before a change lands.
ci:
    .ci/run
