//! The options of `haul push` and `haul pull` that select, replace and delete, as rsync's.

mod common {
    pub mod command;
}

use common::command::{haul, run};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

struct Folders(tempfile::TempDir);

impl Folders {
    /// A source with these files.
    fn new(files: &[&str]) -> Self {
        let folders = Self(tempfile::tempdir().unwrap());
        fs::create_dir(folders.path("source")).unwrap();
        fs::create_dir(folders.path("copy")).unwrap();
        // The other end runs without ssh.
        fs::write(folders.path("local"), "shift; exec \"$@\"\n").unwrap();
        for file in files {
            folders.write("source", file);
        }
        folders
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, folder: &str, file: &str) {
        let path = self.path(folder).join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, file).unwrap();
    }

    /// Pushes the content of the source, and returns the exit code and what was printed.
    fn push(&self, arguments: &[&str]) -> (i32, String) {
        self.push_sources(arguments, &[self.path("source").join("").to_str().unwrap()])
    }

    fn push_sources(&self, arguments: &[&str], sources: &[&str]) -> (i32, String) {
        let destination = format!("x:{}", self.path("copy").display());
        let paths = [sources, &[&destination]].concat();
        self.run("push", arguments, &paths)
    }

    /// Runs a command whose other end is started here.
    fn run(&self, command: &str, arguments: &[&str], paths: &[&str]) -> (i32, String) {
        let mut command = haul(&[command, "-e"]);
        command.arg(format!("sh {}", self.path("local").display()));
        command.args(["--remote-haul", env!("CARGO_BIN_EXE_haul")]).args(arguments).args(paths);
        let (output, transcript) = run(&mut command);
        (output.status.code().unwrap(), transcript)
    }

    /// The files of the copy.
    fn copied(&self) -> Vec<String> {
        self.names("copy")
    }

    /// The files below a folder.
    fn names(&self, folder: &str) -> Vec<String> {
        let (root, mut names) = (self.path(folder), Vec::new());
        list(&root, &root, &mut names);
        names.sort();
        names
    }
}

fn list(root: &Path, folder: &Path, names: &mut Vec<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.is_symlink() {
            list(root, &path, names);
        } else {
            names.push(path.strip_prefix(root).unwrap().to_str().unwrap().to_owned());
        }
    }
}

#[test]
fn patterns_are_tried_in_the_order_of_the_command_line() {
    let folders = Folders::new(&["a.o", "keep.o", "sub/b.o", "sub/b.c", "cache/x"]);
    let rules = folders.path("rules");
    fs::write(&rules, "# a comment\n\n- /cache/\n+ b.c\n").unwrap();
    let from = format!("--exclude-from={}", rules.display());
    let (code, transcript) = folders.push(&["--include=keep.o", "--exclude", "*.o", &from]);
    assert_eq!(code, 0, "{transcript}");
    assert_eq!(folders.copied(), ["keep.o", "sub/b.c"]);
    let (code, transcript) = folders.push(&["--exclude=*.o", "--include=a.o", "--exclude=cache"]);
    assert_eq!(code, 0, "{transcript}");
    assert_eq!(folders.copied(), ["keep.o", "sub/b.c"]);
}

#[test]
fn a_deletion_has_a_brake() {
    let names: Vec<_> = (0..12).map(|number| format!("file{number}")).collect();
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    let folders = Folders::new(&names);
    let outside = folders.path("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("file"), "outside").unwrap();
    folders.write("copy", "old/a/b");
    folders.write("copy", "kept.tmp");
    std::os::unix::fs::symlink(&outside, folders.path("copy/old/link")).unwrap();
    let arguments = ["--delete", "--exclude=*.tmp"];
    // A dry run deletes nothing.
    let (code, transcript) = folders.push(&[&arguments[..], &["-n"]].concat());
    assert!(code == 0 && transcript.contains(", 4 would be deleted,"), "{transcript}");
    assert!(folders.path("copy/old/a/b").exists());
    let (code, transcript) = folders.push(&arguments);
    assert!(code == 0 && transcript.contains(", 4 deleted,"), "{transcript}");
    let mut expected = names.clone();
    expected.push("kept.tmp");
    expected.sort_unstable();
    assert_eq!(folders.copied(), expected);
    assert!(outside.join("file").exists(), "a link was followed");
    // Eleven of thirteen entries are too many.
    for name in &names[1..] {
        fs::remove_file(folders.path("source").join(name)).unwrap();
    }
    let (code, transcript) = folders.push(&arguments);
    assert_eq!(code, 25, "{transcript}");
    assert!(transcript.contains("11 of 13 entries are more than a quarter"), "{transcript}");
    assert_eq!(folders.copied(), expected);
    let (code, transcript) = folders.push(&["--delete=all", "--delete-excluded"]);
    assert_eq!(code, 0, "{transcript}");
    assert_eq!(folders.copied(), ["file0"]);
}

/// A disk that is not mounted looks like an empty source.
#[test]
fn an_empty_or_broken_source_deletes_nothing() {
    let folders = Folders::new(&[]);
    folders.write("copy", "backup");
    let (code, transcript) = folders.push(&["--delete"]);
    assert_eq!(code, 25, "{transcript}");
    assert!(transcript.contains("the source is empty"), "{transcript}");
    folders.write("source", "file");
    folders.write("copy", "source/old");
    let [missing, source] = ["missing", "source"].map(|name| folders.path(name));
    let sources = [missing.to_str().unwrap(), source.to_str().unwrap()];
    let (code, transcript) = folders.push_sources(&["--delete=all"], &sources);
    assert_eq!(code, 23, "{transcript}");
    assert!(transcript.contains("nothing was deleted, because of the errors"), "{transcript}");
    assert_eq!(folders.copied(), ["backup", "source/file", "source/old"]);
    let (code, transcript) = folders.push_sources(&[], &[""]);
    assert!(code == 2 && transcript.contains("a source is empty"), "{transcript}");
    // What two sources lack together is not known.
    let content = folders.path("source").join("");
    let sources = [content.to_str().unwrap(), source.to_str().unwrap()];
    let (code, transcript) = folders.push_sources(&["--delete=all"], &sources);
    assert!(code == 2 && transcript.contains("delete with several sources"), "{transcript}");
    let (code, transcript) = folders.push(&["-t", "--delete"]);
    assert!(code == 2 && transcript.contains("add -r or -a"), "{transcript}");
}

#[test]
fn files_are_listed_also_in_a_dry_run() {
    let folders = Folders::new(&["a", "sub/b"]);
    for arguments in [&["-avn"][..], &["-av"]] {
        let (code, transcript) = folders.push(arguments);
        assert_eq!(code, 0, "{transcript}");
        let lines: Vec<_> = transcript.lines().collect();
        assert!(lines.contains(&"a") && lines.contains(&"sub/b"), "{transcript}");
    }
    let (_, transcript) = folders.push(&["-av"]);
    assert!(!transcript.lines().any(|line| line == "a"), "{transcript}");
}

#[test]
fn sizes_and_rates_are_limits() {
    let folders = Folders::new(&["small"]);
    fs::write(folders.path("source/large"), vec![1; 300_000]).unwrap();
    let (code, transcript) = folders.push(&["--max-size=100K"]);
    assert_eq!((code, folders.copied()), (0, vec!["small".to_owned()]), "{transcript}");
    let begun = Instant::now();
    let (code, transcript) = folders.push(&["--bwlimit=400"]);
    assert_eq!(code, 0, "{transcript}");
    // 293 KiB at 400 KiB/s.
    assert!(begun.elapsed() > Duration::from_millis(500), "{transcript}");
    assert_eq!(folders.copied(), ["large", "small"]);
}

#[test]
fn other_options_of_rsync_are_accepted_or_explained() {
    let folders = Folders::new(&["a"]);
    let (code, transcript) = folders.push(&["-avPS", "--partial", "--numeric-ids", "--stats"]);
    assert_eq!(code, 0, "{transcript}");
    for (arguments, advice) in [
        (&["-avb"][..], "--backup is an option of rsync: haul keeps no old versions"),
        (&["--checksum"], "--size-only"),
        (&["--files-from=/no/list"], "/no/list: No such file"),
        (&["--from0"], "--files-from"),
        (&["--max-size=x"], "1.5M"),
        (&["--bwlimit=fast"], "a size such as"),
        (&["--exclude="], "the pattern is empty"),
        (&["--exclude-from=/no/file"], "/no/file: No such file"),
        (&["--streams=900"], "a number up to 64"),
        (&["--data-port=9-5"], "5000-5010"),
    ] {
        let (code, transcript) = folders.push(arguments);
        assert_eq!(code, 2, "{transcript}");
        assert!(transcript.contains(advice), "{arguments:?}: {transcript}");
    }
}

#[test]
fn lines_are_json_documents() {
    let folders = Folders::new(&["a"]);
    fs::write(folders.path("source/large"), vec![1; 1_000_000]).unwrap();
    std::os::unix::fs::symlink("missing", folders.path("source/link")).unwrap();
    let arguments = ["-rLv", "--json", "--bwlimit=400", "--streams=0"];
    let (code, transcript) = folders.push(&arguments);
    assert_eq!(code, 23, "{transcript}");
    let lines = transcript.lines().filter(|line| line.starts_with('{'));
    let lines: Vec<serde_json::Value> =
        lines.map(|line| serde_json::from_str(line).unwrap()).collect();
    let count = |event: &str| lines.iter().filter(|line| line["event"] == event).count();
    assert_eq!((count("file"), count("error")), (2, 1), "{transcript}");
    let progress = lines.iter().find(|line| line["event"] == "progress").unwrap();
    assert!(progress["bytes_done"].as_u64() <= progress["bytes"].as_u64(), "{transcript}");
    let summary = lines.last().unwrap();
    assert_eq!(summary["event"], "summary");
    assert_eq!(summary["bytes_sent"], 1_000_001);
    assert_eq!((&summary["errors"], &summary["exit_code"]), (&1.into(), &23.into()));
    // Usually the limit, and something else on a machine that is very busy.
    assert!(summary["waited_for"]["cause"].is_string(), "{transcript}");
    for host in ["cpu_s_here", "cpu_s_there"] {
        assert!(summary[host].as_f64().unwrap() > 0.0, "{transcript}");
    }
    let (code, transcript) = folders.run("push", &["--json", "-vv", "-e", "false"], &["/", "x:"]);
    assert_eq!(code, 12, "{transcript}");
    assert!(transcript.contains(r#"{"event":"failed","message":"#), "{transcript}");
}

/// Both directions take a list, from a file and from standard input.
#[test]
fn a_list_names_what_is_copied() {
    let folders = Folders::new(&["a", "sub/b", "sub/c", "sub/deep/d", "e"]);
    let list = folders.path("list");
    fs::write(&list, "# a comment\n/sub/b\n\nsub/deep\n./a\nsub/b\n").unwrap();
    let listed = format!("--files-from={}", list.display());
    let (code, transcript) = folders.push(&["-a", &listed]);
    assert_eq!((code, folders.copied()), (0, vec!["a".to_owned(), "sub/b".to_owned()]));
    assert!(folders.path("copy/sub/deep").is_dir(), "{transcript}");
    let (code, transcript) = folders.push(&["-a", "-r", &listed]);
    assert_eq!((code, folders.copied().len()), (0, 3), "{transcript}");
    let source = format!("x:{}", folders.path("source").display());
    let destination = folders.path("pulled");
    let destination = destination.to_str().unwrap();
    let (code, transcript) = folders.run("pull", &["-ar", &listed], &[&source, destination]);
    assert_eq!((code, folders.names("pulled")), (0, folders.copied()), "{transcript}");
    fs::write(&list, "a\0../secret\0").unwrap();
    let (code, transcript) = folders.push(&["-a0", &listed]);
    assert_eq!(code, 2, "{transcript}");
    assert!(transcript.contains("path 2: \"../secret\" contains .."), "{transcript}");
    fs::write(&list, "a\0e\0").unwrap();
    let (code, transcript) = folders.push(&["-a", &listed]);
    assert!(code == 2 && transcript.contains("add --from0"), "{transcript}");
    fs::write(&list, "missing\na\n").unwrap();
    let (code, transcript) = folders.push(&["-a", &listed]);
    assert_eq!(code, 23, "{transcript}");
    assert!(transcript.contains("source/missing: No such file"), "{transcript}");
    fs::write(&list, "# nothing\n").unwrap();
    let (code, transcript) = folders.push(&["-a", &listed]);
    assert!(code == 2 && transcript.contains("the list is empty"), "{transcript}");
}

#[test]
fn a_second_copy_links_to_an_earlier_copy() {
    let folders = Folders::new(&["a", "sub/b"]);
    assert_eq!(folders.push(&["-a"]).0, 0);
    fs::rename(folders.path("copy"), folders.path("earlier")).unwrap();
    let (code, transcript) = folders.push(&["-az", "--link-dest=../earlier"]);
    assert_eq!(code, 0, "{transcript}");
    assert!(transcript.contains("2 linked to an earlier copy"), "{transcript}");
    fs::remove_dir_all(folders.path("copy")).unwrap();
    let (_, transcript) = folders.push(&["-an", "--link-dest=../earlier"]);
    assert!(transcript.contains("2 linked to an earlier copy"), "{transcript}");
    let (code, transcript) = folders.push(&["-a", "--link-dest=../earlier"]);
    assert_eq!(code, 0, "{transcript}");
    let [one, other] = ["copy", "earlier"].map(|copy| folders.path(copy).join("sub/b"));
    assert_eq!(one.metadata().unwrap().ino(), other.metadata().unwrap().ino());
}

/// With `-I`, files whose times are equal are compared.
#[test]
fn blocks_that_are_equal_there_are_not_sent() {
    let folders = Folders::new(&[]);
    let content: Vec<u8> = (0..4 << 20).map(|at: u32| (at >> 12) as u8 ^ at as u8).collect();
    fs::write(folders.path("source/image"), &content).unwrap();
    for (options, mtime) in [(&["--delta"][..], 1), (&["-I", "--delta=rolling"], 2)] {
        let mut old = content.clone();
        old[2 << 20] ^= 1;
        fs::write(folders.path("copy/image"), &old).unwrap();
        for (folder, seconds) in [("source", 2), ("copy", mtime)] {
            let path = folders.path(folder).join("image");
            let file = fs::File::options().write(true).open(path).unwrap();
            file.set_modified(std::time::UNIX_EPOCH + Duration::from_secs(seconds)).unwrap();
        }
        let (code, transcript) = folders.push(&[options, &["--json"]].concat());
        assert_eq!(code, 0, "{transcript}");
        assert!(fs::read(folders.path("copy/image")).unwrap() == content);
        let line = transcript.lines().find(|line| line.contains("bytes_equal")).unwrap();
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        let [sent, equal] = ["bytes_sent", "bytes_equal"].map(|key| line[key].as_u64().unwrap());
        assert!(sent <= 512 << 10 && sent + equal == 4 << 20, "{transcript}");
    }
}

/// As in issue 359 of rsync, a source that is its own destination must stay.
#[test]
fn a_folder_that_is_pushed_onto_itself_stays() {
    let folders = Folders::new(&["a", "sub/b"]);
    fs::write(folders.path("source/large"), vec![1; 9 << 20]).unwrap();
    let source = folders.path("source");
    for arguments in [&["-a"][..], &["-I", "--delete=all"]] {
        let mut command = haul(&["push", "-e"]);
        command.arg(format!("sh {}", folders.path("local").display()));
        command.args(["--remote-haul", env!("CARGO_BIN_EXE_haul")]).args(arguments);
        command.arg(source.join("")).arg(format!("x:{}", source.display()));
        let (output, transcript) = run(&mut command);
        assert!(output.status.success(), "{transcript}");
        let mut names = Vec::new();
        list(&source, &source, &mut names);
        names.sort();
        assert_eq!(names, ["a", "large", "sub/b"], "{transcript}");
        assert_eq!(fs::read(source.join("large")).unwrap(), vec![1; 9 << 20]);
        assert_eq!(fs::read_to_string(source.join("sub/b")).unwrap(), "sub/b");
    }
}
