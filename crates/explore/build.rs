//! Links the random numbers of the explorer into its tests.

fn main() {
    println!("cargo::rerun-if-changed=src/random.c");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() != Ok("linux") {
        return;
    }
    for object in cc::Build::new().file("src/random.c").compile_intermediates() {
        println!("cargo::rustc-link-arg={}", object.display());
    }
    println!("cargo::rustc-link-arg=-Wl,--export-dynamic-symbol=getrandom");
}
