//! The kernels that a guest can boot: packages of Debian, unpacked and not installed.

use super::archive::Archive;
use super::{VmError, step};
use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The kernels that `ci/install --kernels` fetches: Debian 12's, Debian 13's, and the kernel of
/// Debian 13's backports.
const VERSIONS: [&str; 3] = ["6.1", "6.12", "7.3"];

/// An unpacked kernel.
#[derive(Debug)]
pub(super) struct Kernel {
    /// The version with Debian's additions, such as `6.12.117+deb13-amd64`.
    pub release: String,
    /// The compressed kernel.
    pub image: PathBuf,
    /// The folder of the modules.
    modules: PathBuf,
    /// The modules that are part of the image.
    builtin: HashSet<String>,
    /// The configuration; empty if the package does not contain a configuration.
    config: String,
}

/// Folder into which `ci/install` unpacks the kernel of this Debian. With the suffix `-VERSION` the
/// folder of another kernel.
fn cache_folder(suffix: &str) -> PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache");
    cache.unwrap_or_else(home).join(format!("haul-vm{suffix}"))
}

impl Kernel {
    /// The kernel of a version or in a folder; without a name the kernel of this Debian.
    pub fn select(name: Option<&str>) -> Result<Self, VmError> {
        let Some(name) = name else {
            let folder = cache_folder("");
            let missing = || VmError::Missing(format!("Debian's kernel in {}", folder.display()));
            return Self::in_folder(&folder)?.ok_or_else(missing);
        };
        if VERSIONS.contains(&name) {
            let folder = cache_folder(&format!("-{name}"));
            return Self::in_folder(&folder)?.ok_or_else(|| {
                VmError::Kernel(format!(
                    "Linux {name} is not here: run ci/install --kernels as root"
                ))
            });
        }
        let folder = Path::new(name);
        if !folder.is_dir() {
            let versions = VERSIONS.join(", ");
            return Err(VmError::Kernel(format!(
                "--kernel {name}: write {versions}, or a folder with an unpacked kernel"
            )));
        }
        Self::in_folder(folder)?.ok_or_else(|| {
            VmError::Kernel(format!(
                "--kernel {name}: the folder has neither boot/vmlinuz-VERSION nor \
                 lib/modules/VERSION/vmlinuz: unpack a package of Debian's kernel with dpkg -x"
            ))
        })
    }

    /// The kernel of an unpacked package. `None` if the folder does not contain a kernel with its
    /// modules.
    fn in_folder(folder: &Path) -> Result<Option<Self>, VmError> {
        let trees = ["lib/modules", "usr/lib/modules"].map(|tree| folder.join(tree));
        let releases = trees.iter().flat_map(fs::read_dir).flatten().flatten();
        for modules in releases.map(|entry| entry.path()) {
            let release = modules.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let image = [modules.join("vmlinuz"), folder.join(format!("boot/vmlinuz-{release}"))]
                .into_iter()
                .find(|path| path.is_file());
            let Some(image) = image else { continue };
            let list = modules.join("modules.builtin");
            let builtin = fs::read_to_string(&list)
                .map_err(step(format!("reading {}", list.display())))?
                .lines()
                .map(module_name)
                .collect();
            let config = [modules.join("config"), folder.join(format!("boot/config-{release}"))]
                .iter()
                .find_map(|path| fs::read_to_string(path).ok())
                .unwrap_or_default();
            return Ok(Some(Self { release, image, modules, builtin, config }));
        }
        Ok(None)
    }

    /// Whether the kernel fills new pages with zeros by default; `None` if unknown.
    pub fn zeroes_new_pages(&self) -> Option<bool> {
        let is_set = |line: &str| line == "CONFIG_INIT_ON_ALLOC_DEFAULT_ON=y";
        (!self.config.is_empty()).then(|| self.config.lines().any(is_set))
    }

    /// Adds a module to an initramfs and appends the module to `load_order`, after the modules that
    /// it depends on. A module that is part of the image is left out. Returns whether the kernel
    /// has the module.
    pub fn add_module(
        &self,
        archive: &mut Archive,
        name: &str,
        load_order: &mut Vec<String>,
    ) -> Result<bool, VmError> {
        const DEPENDS_TAG: &[u8] = b"\0depends=";
        if self.builtin.contains(name) || load_order.iter().any(|other| other == name) {
            return Ok(true);
        }
        let Some(path) = find_module(&self.modules, name) else { return Ok(false) };
        let content = read_module(&path)?;
        let start = content.windows(DEPENDS_TAG.len()).position(|window| window == DEPENDS_TAG);
        let names = start.map_or(&[][..], |start| &content[start + DEPENDS_TAG.len()..]);
        let names = names.split(|&byte| byte == 0).next().unwrap_or_default();
        for dependency in String::from_utf8_lossy(names).split(',').filter(|name| !name.is_empty())
        {
            self.add_module(archive, &dependency.replace('-', "_"), load_order)?;
        }
        archive.add_content(&format!("modules/{name}.ko"), &content);
        load_order.push(name.into());
        Ok(true)
    }
}

/// The name of a module by the path of its file. A file name may contain hyphens where the name has
/// underscores.
fn module_name(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or_default();
    file.split('.').next().unwrap_or_default().replace('-', "_")
}

/// The file of a module, somewhere below a folder.
fn find_module(folder: &Path, name: &str) -> Option<PathBuf> {
    fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path()).find_map(|path| {
        let file = path.file_name()?.to_string_lossy();
        if path.is_dir() && !path.is_symlink() {
            find_module(&path, name)
        } else {
            let is_module = file.ends_with(".ko") || file.ends_with(".ko.xz");
            (is_module && module_name(&file) == name).then_some(path)
        }
    })
}

/// Reads a module, which Debian compresses since Linux 6.12.
fn read_module(path: &Path) -> Result<Vec<u8>, VmError> {
    if path.extension().is_none_or(|extension| extension != "xz") {
        return fs::read(path).map_err(step(format!("reading {}", path.display())));
    }
    let unpacked = Command::new("xz").arg("-dc").arg(path).output();
    let unpacked = unpacked.map_err(|error| VmError::Missing(format!("xz ({error})")))?;
    if unpacked.status.success() {
        Ok(unpacked.stdout)
    } else {
        let reason = String::from_utf8_lossy(&unpacked.stderr);
        Err(VmError::Kernel(format!("{}: {}", path.display(), reason.trim())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_no_kernel_is_explained() {
        let message = |name: &str| Kernel::select(Some(name)).unwrap_err().to_string();
        assert!(
            message("5.10").contains("write 6.1, 6.12, 7.3, or a folder"),
            "{}",
            message("5.10")
        );
        let empty = tempfile::tempdir().unwrap();
        let name = empty.path().display().to_string();
        assert!(message(&name).contains("the folder has neither"), "{}", message(&name));
    }

    #[test]
    fn both_layouts_of_debian_are_kernels() {
        for (image, modules) in [
            ("boot/vmlinuz-6.1.0-50-amd64", "lib/modules/6.1.0-50-amd64"),
            ("boot/vmlinuz-6.12.1-amd64", "usr/lib/modules/6.12.1-amd64"),
            ("usr/lib/modules/7.3.4-amd64/vmlinuz", "usr/lib/modules/7.3.4-amd64"),
        ] {
            let folder = tempfile::tempdir().unwrap();
            fs::create_dir_all(folder.path().join("boot")).unwrap();
            let modules = folder.path().join(modules);
            fs::create_dir_all(&modules).unwrap();
            fs::write(folder.path().join(image), "").unwrap();
            fs::write(modules.join("modules.builtin"), "kernel/drivers/virtio/virtio-pci.ko\n")
                .unwrap();
            fs::write(modules.join("config"), "CONFIG_INIT_ON_ALLOC_DEFAULT_ON=y\n").unwrap();
            let kernel = Kernel::in_folder(folder.path()).unwrap().unwrap();
            assert_eq!(kernel.image, folder.path().join(image));
            assert_eq!(kernel.zeroes_new_pages(), Some(true));
            let (mut archive, mut order) = (Archive::default(), Vec::new());
            assert!(kernel.add_module(&mut archive, "virtio_pci", &mut order).unwrap());
            assert!(!kernel.add_module(&mut archive, "tls", &mut order).unwrap());
            assert!(order.is_empty());
        }
    }
}
