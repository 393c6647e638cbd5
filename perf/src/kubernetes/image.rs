//! Container images without a registry: archives in the format of `docker save`, one layer each.
//!
//! Two are made: `pause` for sandboxes, and one root file system for the tests' pods, which
//! stands for agnhost and for busybox: agnhost itself, busybox's applets, and a shell, curl and a
//! BSD netcat, which the tests run, with the libraries that those need.

use std::collections::BTreeSet;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::json;
use sha2::{Digest, Sha256};

use super::programs::{Programs, which};
use crate::cmd::Cmd;

/// The sandbox image.
pub const PAUSE: &str = "skein.test/pause:1";

/// The name under which the tests' image is known, tag included.
///
/// # Errors
/// If [`archives`] has not made it.
pub fn agnhost(programs: &Programs) -> Result<String> {
    let path = programs.folder().join(FOLDER).join(AGNHOST_NAME);
    std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
}

const AGNHOST_NAME: &str = "agnhost.name";

/// Where the archives are, beside the programs; the number is raised when something else goes
/// into them.
const FOLDER: &str = "images-1";

/// An archive that containerd imports.
struct Image {
    tags: Vec<String>,
    entrypoint: &'static [&'static str],
    command: &'static [&'static str],
}

/// The archives of all images, made on the first call and kept beside the programs.
///
/// # Errors
/// If a program that goes into one is missing, or the files cannot be written.
pub fn archives(programs: &Programs) -> Result<Vec<PathBuf>> {
    let folder = programs.folder().join(FOLDER);
    let finished = [folder.join("pause.tar"), folder.join("agnhost.tar")];
    if finished.iter().all(|path| path.is_file()) {
        return Ok(finished.to_vec());
    }
    std::fs::create_dir_all(&folder)
        .with_context(|| format!("cannot make {}", folder.display()))?;
    let work = folder.join(format!(".{}", std::process::id()));
    let made = make_all(programs, &work, &finished);
    drop(std::fs::remove_dir_all(&work));
    made.map(|()| finished.to_vec())
}

fn make_all(programs: &Programs, work: &Path, finished: &[PathBuf; 2]) -> Result<()> {
    let root = work.join("pause");
    add(&root, &programs.path("pause"), "pause")?;
    let pause = Image {
        tags: vec![PAUSE.to_owned()],
        entrypoint: &["/pause"],
        command: &[],
    };
    pause.write(&root, work, &finished[0])?;
    let root = work.join("agnhost");
    agnhost_root(programs, &root)?;
    let tags = test_tags(programs)?;
    let name = tags.iter().find(|tag| tag.contains("/agnhost:"));
    let name = name.context("`e2e.test --list-images` names no agnhost")?;
    if let Some(folder) = finished[1].parent() {
        std::fs::write(folder.join(AGNHOST_NAME), name)?;
    }
    let agnhost = Image {
        tags,
        entrypoint: &["/agnhost"],
        command: &["pause"],
    };
    agnhost.write(&root, work, &finished[1])
}

/// The names under which the tests ask for their images.
fn test_tags(programs: &Programs) -> Result<Vec<String>> {
    let list = Cmd::new(programs.path("e2e.test"))
        .arg("--list-images")
        .run()?
        .stdout;
    Ok(list
        .lines()
        .filter(|tag| {
            let name = tag.rsplit('/').next().unwrap_or_default();
            name.starts_with("agnhost:") || name.starts_with("busybox:")
        })
        .map(ToOwned::to_owned)
        .collect())
}

fn agnhost_root(programs: &Programs, root: &Path) -> Result<()> {
    add(root, &programs.path("agnhost"), "agnhost")?;
    symlink("agnhost", root.join("agnhost-2"))?;
    for name in ["localhost.crt", "localhost.key"] {
        add(root, &programs.path(name), name)?;
    }
    for folder in ["etc", "tmp", "uploads", "usr/bin"] {
        std::fs::create_dir_all(root.join(folder))?;
    }
    std::fs::write(root.join("etc/passwd"), "root:x:0:0:root:/root:/bin/sh\n")?;
    std::fs::write(root.join("etc/group"), "root:x:0:\n")?;
    let busybox = which("busybox").context("busybox is not installed")?;
    add(root, &busybox, "bin/busybox")?;
    let applets = Cmd::new(&busybox).arg("--list").run()?.stdout;
    for applet in applets
        .lines()
        .filter(|a| !["busybox", "nc", "sh"].contains(a))
    {
        symlink("busybox", root.join("bin").join(applet))?;
    }
    let mut libraries = BTreeSet::new();
    for (program, name) in [
        // Not busybox's shell: that takes its own applets for commands before it searches PATH.
        ("dash", "bin/sh"),
        ("curl", "usr/bin/curl"),
        ("nc.openbsd", "usr/bin/nc"),
    ] {
        let path = which(program).with_context(|| format!("{program} is not installed"))?;
        add(root, &path, name)?;
        libraries.extend(shared_libraries(&path)?);
    }
    for library in libraries {
        add(root, Path::new(&library), library.trim_start_matches('/'))?;
    }
    Ok(())
}

/// The libraries that a program loads, its dynamic linker among them, as ldd(1) lists them.
fn shared_libraries(program: &Path) -> Result<Vec<String>> {
    let list = Cmd::new("ldd").arg(program).run()?.stdout;
    // `libc.so.6 => /lib/…/libc.so.6 (0x…)`, or the path alone; linux-vdso has none.
    Ok(list
        .split_whitespace()
        .filter(|word| word.starts_with('/'))
        .map(ToOwned::to_owned)
        .collect())
}

/// Copies a program to `name` below `root`.
fn add(root: &Path, program: &Path, name: &str) -> Result<()> {
    let target = root.join(name);
    if let Some(folder) = target.parent() {
        std::fs::create_dir_all(folder)?;
    }
    std::fs::copy(program, &target)
        .map(drop)
        .with_context(|| format!("cannot copy {} into an image", program.display()))
}

impl Image {
    /// Packs `root` as the image's only layer and writes the archive.
    fn write(&self, root: &Path, work: &Path, archive: &Path) -> Result<()> {
        let folder = work.join("archive");
        std::fs::create_dir_all(&folder)?;
        let layer = folder.join("layer.tar");
        pack(root, &layer, ".")?;
        let config = self.config(&digest(&layer)?);
        let name = format!("{}.json", hex(&Sha256::digest(&config)));
        std::fs::write(folder.join(&name), &config)?;
        let manifest = json!([{
            "Config": name,
            "RepoTags": self.tags,
            "Layers": ["layer.tar"],
        }]);
        std::fs::write(folder.join("manifest.json"), manifest.to_string())?;
        let unfinished = work.join("archive.tar");
        pack(&folder, &unfinished, ".")?;
        std::fs::rename(&unfinished, archive)?;
        std::fs::remove_dir_all(&folder)?;
        Ok(())
    }

    /// The image's configuration, as the OCI image specification has it.
    fn config(&self, layer: &str) -> String {
        let architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        };
        json!({
            "architecture": architecture,
            "os": "linux",
            "config": {
                "Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"],
                "Entrypoint": self.entrypoint,
                "Cmd": self.command,
            },
            "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{layer}")]},
        })
        .to_string()
    }
}

/// The same content gives the same archive: no times, no owners, one order.
fn pack(folder: &Path, archive: &Path, what: &str) -> Result<()> {
    Cmd::line("tar --create --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --file")
        .arg(archive)
        .arg("--directory")
        .arg(folder)
        .arg(what)
        .run()
        .map(drop)
}

fn digest(path: &Path) -> Result<String> {
    let mut hash = Sha256::new();
    let mut file = std::fs::File::open(path)?;
    std::io::copy(&mut file, &mut hash)?;
    Ok(hex(&hash.finalize()))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_holds_manifest_configuration_and_the_layer_with_its_hash() {
        let work = tempfile::tempdir().unwrap();
        let root = work.path().join("root");
        std::fs::create_dir(&root).unwrap();
        std::fs::write(root.join("hello"), "hello").unwrap();
        let image = Image {
            tags: vec!["skein.test/hello:1".into()],
            entrypoint: &["/hello"],
            command: &[],
        };
        let archive = work.path().join("hello.tar");
        image.write(&root, work.path(), &archive).unwrap();
        let out = work.path().join("out");
        std::fs::create_dir(&out).unwrap();
        Cmd::line("tar --extract --directory")
            .arg(&out)
            .arg("--file")
            .arg(&archive)
            .run()
            .unwrap();
        let read = |name: &str| -> serde_json::Value {
            serde_json::from_str(&std::fs::read_to_string(out.join(name)).unwrap()).unwrap()
        };
        let manifest = read("manifest.json");
        assert_eq!(manifest[0]["RepoTags"][0], "skein.test/hello:1");
        let config = read(manifest[0]["Config"].as_str().unwrap());
        let layer = digest(&out.join("layer.tar")).unwrap();
        assert_eq!(config["rootfs"]["diff_ids"][0], format!("sha256:{layer}"));
    }

    #[test]
    fn libraries_of_a_program_are_files() {
        let libraries = shared_libraries(&which("tar").unwrap()).unwrap();
        assert!(libraries.iter().any(|path| path.contains("libc.so")));
        assert!(libraries.iter().all(|path| Path::new(path).is_file()));
    }
}
