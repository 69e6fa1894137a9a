//! Puts the compiled kernel programs where `src/kernel/object.rs` includes them from.
//!
//! They come from `cargo xtask build`, which needs more of a toolchain than this crate does. So
//! that the crate can be checked, linted and unit-tested without it, a missing object is no error
//! here: the binary is then built without programs, and says so when it is asked to load them.

use std::{
    env,
    error::Error,
    fs,
    path::{Path, PathBuf},
};

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-env-changed=DATAPLANE_EBPF_OBJECT");
    println!("cargo::rerun-if-env-changed=CARGO_TARGET_DIR");
    let destination = PathBuf::from(env::var("OUT_DIR")?).join("dataplane-ebpf");

    if let Some(named) = env::var_os("DATAPLANE_EBPF_OBJECT").filter(|path| !path.is_empty()) {
        let named = PathBuf::from(named);
        println!("cargo::rerun-if-changed={}", named.display());
        fs::copy(&named, &destination)
            .map_err(|error| format!("DATAPLANE_EBPF_OBJECT={}: {error}", named.display()))?;
        return Ok(());
    }

    let workspace = Path::new(&env::var("CARGO_MANIFEST_DIR")?).join("../..");
    // `join` with an absolute path is that path.
    let target = workspace.join(env::var_os("CARGO_TARGET_DIR").unwrap_or("target".into()));
    let directory = target.join("bpf");
    let object = directory.join("dataplane-ebpf");
    if object.exists() {
        println!("cargo::rerun-if-changed={}", object.display());
        fs::copy(&object, &destination)?;
    } else {
        // Watch the directory: cargo takes a watched file that does not exist for changed, and
        // would compile this crate anew each time.
        fs::create_dir_all(&directory)?;
        println!("cargo::rerun-if-changed={}", directory.display());
        fs::write(&destination, [])?;
    }
    Ok(())
}
