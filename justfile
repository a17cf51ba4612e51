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
    EXPLORE_SEEDS={{ SEEDS }} cargo test --locked -p capstan-explore --test it -- --nocapture {{ ARGS }}

# Run all tests. The first run builds the real parts with Go.
test *ARGS:
    cargo test --workspace --locked {{ ARGS }}

# Run the tests against the controllers that Capstan replaces and with clusterctl; builds CAPV, CAPZ and clusterctl with Go.
peers:
    cargo test --workspace --locked --test it peers -- --ignored --test-threads=1

# Run a benchmark: just bench vsphere --machines 50
bench *ARGS:
    cargo run --release --locked -p capstan-bench -- {{ ARGS }}

# Start a cluster, simulated clouds, the controllers and examples on this machine.
up *ARGS:
    cargo run --release --locked -p capstan -- up {{ ARGS }}

# Write deploy/crds from the types.
crds:
    UPDATE_CRDS=1 cargo test --locked -p capstan-api --test it crds

# Write docs/reference.md from the program and its sources.
reference:
    UPDATE_REFERENCE=1 cargo test --locked -p capstan --test it docs::reference

# Write deploy/prometheus/dashboards from the table in crates/capstan/tests/it/dashboards.rs.
dashboards:
    UPDATE_DASHBOARDS=1 cargo test --locked -p capstan --test it dashboards

# Build the book of docs/ into target/book; needs mdbook.
book:
    mdbook build docs

# Write a repository for clusterctl to target/clusterctl; needs kubectl.
clusterctl VERSION="v0.1.0" IMAGE="localhost/capstan:0.1.0":
    deploy/clusterctl/release.sh "${CARGO_TARGET_DIR:-target}/clusterctl" {{ VERSION }} {{ IMAGE }}

# Check the dependencies for known vulnerabilities; needs cargo-deny and a network.
advisories:
    cargo deny --locked check advisories

# Write the bill of materials of the production program to target/capstan.cdx.json, and put it into the binary too; needs cargo-cyclonedx and cargo-auditable.
sbom:
    cargo cyclonedx --format json --spec-version 1.5 --no-default-features --manifest-path crates/capstan/Cargo.toml --describe binaries
    rm -f bench/capstan-bench_bin.cdx.json
    mkdir -p "${CARGO_TARGET_DIR:-target}"
    mv crates/capstan/capstan_bin.cdx.json "${CARGO_TARGET_DIR:-target}/capstan.cdx.json"
    cargo auditable build --release --locked -p capstan --no-default-features

# Write an OCI image layout of the production program, with its bill of materials, to target/image; needs umoci and what `just sbom` needs.
image TAG="0.1.0": sbom
    SBOM="${CARGO_TARGET_DIR:-target}/capstan.cdx.json" deploy/image.sh "${CARGO_TARGET_DIR:-target}/release/capstan" "${CARGO_TARGET_DIR:-target}/image" {{ TAG }}

# Write the Helm charts as packages to target/charts; needs helm.
charts:
    helm package charts/capstan charts/capstan-crds --destination "${CARGO_TARGET_DIR:-target}/charts"

# Run everything that must hold before a change lands.
ci:
    .ci/run
