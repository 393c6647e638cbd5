//! Compiles the XDP programs to BPF objects in `OUT_DIR`, which `io::program` embeds.
//!
//! Needs clang with the BPF target, and the headers of libbpf and of the kernel: on Debian and
//! Ubuntu the packages `clang libbpf-dev linux-libc-dev`. `CLANG` names another compiler.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

const PROGRAMS: [&str; 3] = ["pod", "host", "uplink"];
const PACKAGES: &str = "apt-get install clang libbpf-dev linux-libc-dev";

fn main() {
    println!("cargo::rerun-if-env-changed=CLANG");
    println!("cargo::rerun-if-changed=bpf");
    if let Err(reason) = build() {
        for line in reason.lines() {
            println!("cargo::error={line}");
        }
    }
}

fn build() -> Result<(), String> {
    let out = PathBuf::from(env::var("OUT_DIR").map_err(|e| format!("OUT_DIR: {e}"))?);
    let clang = env::var("CLANG").unwrap_or_else(|_| "clang".into());
    for program in PROGRAMS {
        compile(
            &clang,
            &Path::new("bpf").join(format!("{program}.bpf.c")),
            &out.join(format!("{program}.bpf.o")),
        )?;
    }
    Ok(())
}

fn compile(clang: &str, source: &Path, object: &Path) -> Result<(), String> {
    let mut command = Command::new(clang);
    command.args(["-O2", "-g", "-Wall", "-Werror", "-target", "bpf"]);
    if let Some(folder) = kernel_headers() {
        command.arg("-isystem").arg(folder);
    }
    command.arg("-c").arg(source).arg("-o").arg(object);
    let output = command.output().map_err(|error| {
        format!("the XDP programs need clang: cannot run `{clang}`: {error}; {PACKAGES}")
    })?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let advice = if text.contains("file not found") {
        format!("a header is missing: {PACKAGES}\n")
    } else {
        String::new()
    };
    Err(format!(
        "clang could not compile {}\n{advice}{text}",
        source.display()
    ))
}

/// Folder of the architecture's own kernel headers (`asm/types.h`): with `-target bpf` clang
/// does not search it by itself. `None` where they stand in `/usr/include`.
fn kernel_headers() -> Option<PathBuf> {
    let arch = env::var("CARGO_CFG_TARGET_ARCH").ok()?;
    let folder = PathBuf::from(format!("/usr/include/{arch}-linux-gnu"));
    fs::exists(folder.join("asm/types.h"))
        .unwrap_or(false)
        .then_some(folder)
}
