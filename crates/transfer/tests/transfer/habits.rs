//! Options of rsync beyond letters: kept paths, lists, links that are followed, earlier copies and
//! compression. Copies are compared with rsync's.

use crate::common::{content_of, copy, dump_of};
use crate::rsync::{assert_equal_lines, letter_tree, run_rsync, trees};
use fastrand::Rng;
use haul_transfer::{Options, Preserve};
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::UNIX_EPOCH;

/// All paths of a tree, without the root.
fn paths_of(root: &Path) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.symlink_metadata().unwrap().is_dir() {
                folders.push(path.clone());
            }
            paths.push(path);
        }
    }
    paths.sort();
    paths
}

/// The permissions and the times of all, so that each folder has another time.
fn spread_attributes(random: &mut Rng, root: &Path) {
    for path in paths_of(root).iter().rev().filter(|path| path.is_dir()) {
        fs::set_permissions(path, fs::Permissions::from_mode(random.u32(..0o100) | 0o700)).unwrap();
        let time = UNIX_EPOCH + std::time::Duration::from_secs(random.u64(1..1 << 30));
        File::open(path).unwrap().set_modified(time).unwrap();
    }
}

fn assert_same(rsync: &Path, haul: &Path, preserve: &Preserve, context: &str) {
    let (theirs, ours) = (dump_of(rsync, preserve), dump_of(haul, preserve));
    // The destination itself has the time of its last change.
    assert_equal_lines(&theirs[1..], &ours[1..], context);
}

#[test]
fn kept_paths_equal_rsyncs() {
    for seed in 7000..7000 + trees() {
        let mut random = Rng::with_seed(seed);
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        letter_tree(&mut random, &path("source"));
        spread_attributes(&mut random, &path("source"));
        let mut listed: Vec<_> = paths_of(&path("source"))
            .into_iter()
            .filter(|_| random.u8(..4) == 0)
            .map(|one| one.strip_prefix(path("source")).unwrap().to_owned())
            .collect();
        random.shuffle(&mut listed);
        if listed.is_empty() {
            continue;
        }
        fs::create_dir(path("rsync")).unwrap();
        fs::create_dir(path("haul")).unwrap();
        let mut options = Options::default();
        options.selection.relative = true;
        options.preserve.recursive = random.bool();
        let lines: Vec<_> = listed.iter().map(|one| one.to_str().unwrap()).collect();
        fs::write(path("list"), lines.join("\n")).unwrap();
        let mut arguments = vec!["-aAXS".to_owned()];
        let list = format!("--files-from={}", path("list").display());
        arguments.extend([list, "--numeric-ids".into()]);
        if options.preserve.recursive {
            arguments.push("-r".into());
        }
        let mut command = Command::new("rsync");
        command.args(&arguments).arg(path("source")).arg(path("rsync"));
        if !run_rsync(&mut command, &[]) {
            return;
        }
        // A path joins no component that is a dot.
        let source = path("source");
        let kept = |line: &&str| [source.as_os_str().as_bytes(), b"/./", line.as_bytes()].concat();
        let sources: Vec<_> = lines.iter().map(kept).collect();
        let summary = copy(&sources, &path("haul"), &options);
        assert_eq!(summary.errors, [], "seed {seed}");
        let preserve = Preserve { hard_links: false, ..options.preserve };
        assert_same(&path("rsync"), &path("haul"), &preserve, &format!("seed {seed}, {lines:?}"));
    }
}

/// Without permissions, a new folder that two sources share gets the permissions of the original.
#[test]
fn sources_share_a_new_folder() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    for source in ["one", "two"] {
        fs::create_dir_all(path(source).join("shared")).unwrap();
        fs::set_permissions(path(source).join("shared"), fs::Permissions::from_mode(0o755))
            .unwrap();
        fs::write(path(source).join("shared").join(source), source).unwrap();
    }
    let mut options = Options::default();
    options.preserve = Preserve { recursive: true, ..Preserve::NOTHING };
    let sources = [content_of(&path("one")), content_of(&path("two"))];
    assert_eq!(copy(&sources, &path("copy"), &options).errors, []);
    let mode = path("copy/shared").metadata().unwrap().mode() & 0o777;
    assert_eq!(mode & 0o700, 0o700);
    assert_ne!(mode & 0o055, 0, "{mode:o}");
}

#[test]
fn followed_links_equal_rsyncs() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    for name in ["source/a", "outside/deep", "rsync", "haul"] {
        fs::create_dir_all(path(name)).unwrap();
    }
    fs::write(path("outside/file"), "outside").unwrap();
    fs::write(path("outside/deep/large"), vec![7; 1 << 20]).unwrap();
    symlink("../outside", path("source/folder")).unwrap();
    symlink("../../outside/file", path("source/a/file")).unwrap();
    symlink("file", path("source/a/chain")).unwrap();
    let mut random = Rng::with_seed(3);
    spread_attributes(&mut random, folder.path());
    let mut options = Options::default();
    options.selection.follow_links = true;
    options.preserve.hard_links = false;
    let mut command = Command::new("rsync");
    command.args(["-aAXSL", "--numeric-ids"]).arg(path("source/")).arg(path("rsync"));
    let has_rsync = run_rsync(&mut command, &["-L"]);
    let summary = copy(&[content_of(&path("source"))], &path("haul"), &options);
    assert_eq!(summary.errors, []);
    assert_eq!(fs::read(path("haul/folder/deep/large")).unwrap(), vec![7; 1 << 20]);
    if has_rsync {
        assert_same(&path("rsync"), &path("haul"), &options.preserve, "-L");
    }

    // With a slash at its end, a path that is kept follows a link.
    let mut relative = Options::default();
    relative.selection.relative = true;
    let kept = [path("source").as_os_str().as_bytes(), b"/./folder/"].concat();
    assert_eq!(copy(&[kept], &path("kept"), &relative).errors, []);
    assert!(path("kept/folder/deep").is_dir() && !path("kept/folder").is_symlink());

    // rsync 3.5 does not copy extended attributes of what a link leads to.
    let flags = rustix::fs::XattrFlags::empty();
    let has_attribute =
        rustix::fs::setxattr(path("outside/file"), "user.test", b"value", flags).is_ok();
    // A link that leads nowhere, and one that leads to a folder around it.
    symlink("nowhere", path("source/dangling")).unwrap();
    symlink("..", path("source/a/loop")).unwrap();
    let summary = copy(&[content_of(&path("source"))], &path("again"), &options);
    let mut failed: Vec<_> = summary.errors.iter().map(|error| error.problem.as_str()).collect();
    failed.sort_unstable();
    assert!(failed[0].contains("leads to a folder that contains it"), "{failed:?}");
    assert!(failed[1].contains("leads to cannot be read"), "{failed:?}");
    assert_eq!(failed.len(), 2);
    assert!(path("again/folder/file").is_file());
    if has_attribute {
        let mut value = [0; 5];
        rustix::fs::getxattr(path("again/a/chain"), "user.test", &mut value[..]).unwrap();
        assert_eq!(&value, b"value");
    }
}

#[test]
fn unchanged_files_become_links_to_an_earlier_copy_as_rsyncs() {
    for seed in 9000..9000 + trees() {
        let mut random = Rng::with_seed(seed);
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        letter_tree(&mut random, &path("source"));
        spread_attributes(&mut random, &path("source"));
        for name in ["rsync", "haul", "earlier"] {
            fs::create_dir(path(name)).unwrap();
        }
        let mut options = Options::default();
        options.preserve.hard_links = false;
        assert_eq!(copy(&[content_of(&path("source"))], &path("earlier"), &options).errors, []);
        // Other content, other permissions, another time.
        for one in paths_of(&path("source")).iter().filter(|one| one.is_file()) {
            let time = one.metadata().unwrap().modified().unwrap();
            match random.u8(..6) {
                0 => fs::write(one, "changed").unwrap(),
                1 => fs::set_permissions(one, fs::Permissions::from_mode(0o640)).unwrap(),
                2 => {
                    let later = time + std::time::Duration::from_secs(1);
                    File::options().write(true).open(one).unwrap().set_modified(later).unwrap();
                }
                _ => {}
            }
        }
        let mut command = Command::new("rsync");
        command.args(["-aAXS", "--numeric-ids", "--link-dest=../earlier"]);
        command.arg(path("source/")).arg(path("rsync"));
        if !run_rsync(&mut command, &["--link-dest"]) {
            return;
        }
        options.earlier_copies = vec![b"../missing".to_vec(), b"../earlier".to_vec()];
        let summary = copy(&[content_of(&path("source"))], &path("haul"), &options);
        assert_eq!(summary.errors, [], "seed {seed}");
        assert!(summary.notices[0].contains("../missing"), "{:?}", summary.notices);
        let linked = |root: &Path| -> Vec<PathBuf> {
            let files = paths_of(root).into_iter().filter(|one| !one.is_symlink() && one.is_file());
            let linked = files.filter_map(|one| {
                let below = one.strip_prefix(root).unwrap().to_owned();
                let earlier = path("earlier").join(&below).symlink_metadata().ok()?;
                (earlier.ino() == one.metadata().unwrap().ino()).then_some(below)
            });
            linked.collect()
        };
        let (theirs, ours) = (linked(&path("rsync")), linked(&path("haul")));
        assert_eq!(ours, theirs, "seed {seed}: linked by haul, and by rsync");
        assert_eq!(ours.len() as u64, summary.files_linked);
        let preserve = Preserve { hard_links: false, ..options.preserve };
        let without_links = |root: &Path| -> Vec<String> {
            let lines = dump_of(root, &preserve).into_iter().skip(1);
            lines.map(|line| line.rsplit_once(' ').unwrap().0.to_owned()).collect()
        };
        assert_eq!(without_links(&path("haul")), without_links(&path("rsync")), "seed {seed}");
    }
}

#[test]
fn compressed_content_arrives() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let mut random = Rng::with_seed(11);
    letter_tree(&mut random, &path("source"));
    let words = (0..2_000_000).map(|_| random.u8(b'a'..b'h')).collect::<Vec<_>>();
    fs::write(path("source/words"), words).unwrap();
    let mut options = Options::default();
    options.compress = true;
    options.preserve.hard_links = false;
    let summary = copy(&[content_of(&path("source"))], &path("copy"), &options);
    assert_eq!(summary.errors, []);
    // At least the first frame is compressed as a try.
    assert!(summary.bytes_saved > 0 && summary.bytes_saved < summary.bytes_sent, "{summary:?}");
    assert_same(&path("source"), &path("copy"), &options.preserve, "-z");
    // Content that does not become smaller.
    let mut noise = vec![0; 3 << 20];
    random.fill(&mut noise);
    fs::write(path("source/noise"), noise).unwrap();
    let summary = copy(&[content_of(&path("source"))], &path("copy"), &options);
    assert_eq!((summary.errors.len(), summary.files_sent), (0, 1));
    assert_same(&path("source"), &path("copy"), &options.preserve, "-z");
}

/// Two names of one file, with options by which one or both stay at the destination: each name is
/// decided by itself. (rsync 3.5 replaces a newer second name by a link to the first.)
#[test]
fn names_of_one_file_stay_one_by_one() {
    type Choose = fn(&mut Options);
    // The options, and whether a name stays that is missing, older or newer there.
    let cases: [(Choose, [bool; 3]); 5] = [
        (|options| options.replacement.keeps_newer = true, [false, false, true]),
        (|options| options.replacement.only_existing = true, [true, false, false]),
        (|options| options.replacement.keeps_existing = true, [false, true, true]),
        (|options| options.selection.size_max = Some(10), [true, true, true]),
        (|options| options.replacement.size_only = true, [false, false, false]),
    ];
    for (number, (choose, stays)) in cases.into_iter().enumerate() {
        for [a, b] in (0..9).map(|state| [state % 3, state / 3]) {
            let folder = tempfile::tempdir().unwrap();
            let path = |name: &str| folder.path().join(name);
            fs::create_dir(path("source")).unwrap();
            fs::create_dir(path("copy")).unwrap();
            let write = |path: &Path, content: &str, seconds: u64| {
                fs::write(path, content).unwrap();
                let time = UNIX_EPOCH + std::time::Duration::from_secs(seconds);
                File::options().write(true).open(path).unwrap().set_modified(time).unwrap();
            };
            write(&path("source/a"), "the content of both", 2000);
            fs::hard_link(path("source/a"), path("source/b")).unwrap();
            for (name, state) in [("copy/a", a), ("copy/b", b)] {
                if state > 0 {
                    write(&path(name), name, [0, 1000, 3000][state]);
                }
            }
            let mut options = Options::default();
            choose(&mut options);
            let summary = copy(&[content_of(&path("source"))], &path("copy"), &options);
            assert_eq!(summary.errors, [], "case {number}, {a}, {b}");
            for (name, state) in [("copy/a", a), ("copy/b", b)] {
                let expected = match (stays[state], state) {
                    (true, 0) => None,
                    (true, _) => Some(name.to_owned()),
                    (false, _) => Some("the content of both".to_owned()),
                };
                let content = fs::read_to_string(path(name)).ok();
                assert_eq!(content, expected, "case {number}, {a}, {b}, {name}");
            }
            if !stays[a] && !stays[b] {
                let [one, other] = ["copy/a", "copy/b"].map(|name| path(name).metadata().unwrap());
                assert_eq!(one.ino(), other.ino(), "case {number}, {a}, {b}");
            }
        }
    }
}

/// A third name is a link to the second if the first stays.
#[test]
fn a_later_name_is_a_link_to_a_name_with_the_content() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::create_dir(path("source")).unwrap();
    fs::create_dir(path("copy")).unwrap();
    fs::write(path("source/0"), "content").unwrap();
    for name in 1..6 {
        fs::hard_link(path("source/0"), path("source").join(name.to_string())).unwrap();
    }
    fs::write(path("copy/3"), "an earlier file").unwrap();
    let mut options = Options::default();
    options.replacement.keeps_existing = true;
    let summary = copy(&[content_of(&path("source"))], &path("copy"), &options);
    assert_eq!((summary.errors.len(), summary.files_sent, summary.files_kept), (0, 1, 1));
    let names = [0, 1, 2, 4, 5].map(|name| path("copy").join(name.to_string()));
    let inodes = names.map(|name| name.metadata().unwrap().ino());
    assert!(inodes.iter().all(|inode| *inode == inodes[0]));
    assert_eq!(fs::read_to_string(path("copy/3")).unwrap(), "an earlier file");
}
