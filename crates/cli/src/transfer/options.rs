//! The options of `haul push` and `haul pull`, with rsync's letters.

use super::file_list::FileListArguments;
use super::filters::FilterArguments;
use crate::output::Failure;
use clap::{Args, ValueEnum};
use haul_transfer::{
    DataFrom, DeletionMode, Delta, DirectSettings, Durable, EARLIER_COPIES_MAX, Options, Preserve,
    Replacement, STREAMS_MAX, Selection, StreamCount, Verify,
};
use std::ffi::OsString;
use std::ops::RangeInclusive;
use std::os::unix::ffi::OsStrExt;

/// The options. Without a letter that selects what is copied, everything is copied.
#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of the command line")]
pub struct TransferOptions {
    /// Copy as rsync -a does: directories, symbolic links, permissions, times, owner, group and
    /// devices, but not hard links, ACLs and extended attributes (-rlptgoD) [default: everything]
    #[arg(short = 'a', long)]
    pub archive: bool,
    /// Copy directories with their content
    #[arg(short = 'r', long)]
    pub recursive: bool,
    /// Copy symbolic links as links
    #[arg(short = 'l', long)]
    pub links: bool,
    /// Copy what symbolic links lead to, in the places of the links
    #[arg(short = 'L', long)]
    pub copy_links: bool,
    /// Copy permissions
    #[arg(short = 'p', long)]
    pub perms: bool,
    /// Copy modification times
    #[arg(short = 't', long)]
    pub times: bool,
    /// Copy the group, where the user there may set it
    #[arg(short = 'g', long)]
    pub group: bool,
    /// Copy the owner, where the user there is root
    #[arg(short = 'o', long)]
    pub owner: bool,
    /// Copy devices, named pipes and sockets
    #[arg(short = 'D')]
    pub devices: bool,
    /// Copy hard links as hard links
    #[arg(short = 'H', long)]
    pub hard_links: bool,
    /// Copy access control lists; implies --perms
    #[arg(short = 'A', long)]
    pub acls: bool,
    /// Copy extended attributes
    #[arg(short = 'X', long)]
    pub xattrs: bool,
    /// Send files also if size and modification time are the same
    #[arg(short = 'I', long)]
    pub ignore_times: bool,
    /// Take files of the same size for up to date
    #[arg(long)]
    pub size_only: bool,
    /// Keep files there that are newer
    #[arg(short = 'u', long)]
    pub update: bool,
    /// Keep what exists there
    #[arg(long)]
    pub ignore_existing: bool,
    /// Make nothing that does not exist there
    #[arg(long)]
    pub existing: bool,
    /// Leave out larger files, such as 100M
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub max_size: Option<u64>,
    /// Leave out smaller files
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub min_size: Option<u64>,
    /// Do not leave the file system of the source
    #[arg(short = 'x', long)]
    pub one_file_system: bool,
    /// Keep the whole path of each source, or the part after /./
    #[arg(short = 'R', long)]
    pub relative: bool,
    #[command(flatten)]
    pub list: FileListArguments,
    #[command(flatten)]
    pub filters: FilterArguments,
    /// Delete what the source lacks, in directories that are copied, at the end of a transfer
    /// without errors; all: also if that is more than a quarter of the destination, or the source
    /// is empty
    #[arg(
        long,
        value_name = "all",
        require_equals = true,
        num_args = 0..=1,
        default_missing_value = "brake"
    )]
    pub delete: Option<DeleteArgument>,
    /// Delete also what is left out by a pattern; implies --delete
    #[arg(long)]
    pub delete_excluded: bool,
    /// Make unchanged files hard links to the files of an earlier copy, such as ../yesterday; the
    /// path begins at the destination [may be repeated]
    #[arg(long, value_name = "DIR")]
    pub link_dest: Vec<OsString>,
    /// Send only the blocks that differ from the version there, of files of more than 128 KiB. Both
    /// ends read the whole file. rolling: also find content that moved, which takes more CPU time
    #[arg(
        long,
        value_name = "KIND",
        require_equals = true,
        num_args = 0..=1,
        default_missing_value = "fixed"
    )]
    pub delta: Option<DeltaArgument>,
    /// Compress content (zstd) while that makes the transfer faster
    #[arg(short = 'z', long)]
    pub compress: bool,
    /// Send at most so many bytes of content per second, such as 10M; a number alone is KiB
    #[arg(long, value_name = "RATE", value_parser = rate)]
    pub bwlimit: Option<u64>,
    /// Print the name of each file that is sent
    #[arg(short = 'v', long)]
    pub verbose: bool,
    /// Change nothing, and count what would be sent
    #[arg(short = 'n', long)]
    pub dry_run: bool,
    /// Print nothing but errors
    #[arg(short = 'q', long)]
    pub quiet: bool,
    /// Print the progress every 10 s if standard error is not a terminal
    #[arg(short = 'P', long)]
    progress: bool,
    /// Print progress, errors and the result as JSON documents, one in a line
    #[arg(long)]
    pub json: bool,
    /// Command that runs a command on the other host [default: ssh]
    #[arg(short = 'e', long, value_name = "COMMAND")]
    pub rsh: Option<String>,
    /// Command on the other host that starts haul [default: the haul there, or a copy of this
    /// program]
    #[arg(long, visible_alias = "rsync-path", value_name = "PROGRAM")]
    remote_haul: Option<OsString>,
    /// Do not copy this program to a host that lacks haul
    #[arg(long)]
    no_bring: bool,
    /// Checksum of each chunk: crc64 against faults of memory and programs, or blake3, which is
    /// stronger and takes more CPU time
    #[arg(long, value_name = "KIND", default_value = "crc64")]
    pub verify: VerifyArgument,
    /// When content is written to the disk there: batch and each give a file its name after its
    /// content is on the disk, and no leaves the disk to the kernel, as rsync does
    #[arg(long, value_name = "WHEN", default_value = "batch")]
    pub durable: DurableArgument,
    /// Direct TCP connections for the content of files, in the place of ssh: a number, 0 for ssh
    /// alone, or auto: more of them as long as more make the transfer faster
    #[arg(long, value_name = "N", default_value = "auto", value_parser = streams)]
    pub streams: StreamCount,
    /// Do not encrypt direct connections, in a network that you trust. Both ends recognize each
    /// other by a secret from ssh nevertheless
    #[arg(long)]
    pub plain: bool,
    /// Port, or first and last port, of the host that waits for direct connections, such as
    /// 5000-5010 [default: any]
    #[arg(long, value_name = "PORTS", value_parser = ports)]
    pub data_port: Option<RangeInclusive<u16>>,
    /// Host that opens direct connections: here, or there if the other host cannot be reached
    #[arg(long, value_name = "HOST", default_value = "here")]
    pub data_from: DataFromArgument,
}

/// Which deletions are allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DeleteArgument {
    /// Up to a quarter of the destination
    #[value(hide = true)]
    Brake,
    /// Everything that the source lacks
    All,
}

/// How blocks of large files are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DeltaArgument {
    /// Compare each block with the block at the same place
    Fixed,
    /// Find equal blocks at any place
    Rolling,
}

/// The checksum of each chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum VerifyArgument {
    /// CRC-64/NVMe
    Crc64,
    /// BLAKE3
    Blake3,
}

/// When content is written to the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DurableArgument {
    /// A batch of files gets its names after one sync
    Batch,
    /// Each file gets its name after its sync
    Each,
    /// When the kernel writes it
    No,
}

/// The host that opens direct connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DataFromArgument {
    /// This host
    Here,
    /// The other host
    There,
}

/// A size with a letter for a power of 1,024, as rsync's.
fn size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let unit = text[digits.len()..].to_ascii_lowercase();
    let power = match unit.strip_suffix("ib").unwrap_or(&unit) {
        "" | "b" => 0,
        "k" => 1,
        "m" => 2,
        "g" => 3,
        "t" => 4,
        _ => return Err("write a size such as 512, 100K, 1.5M or 2G".into()),
    };
    let scaled = digits.parse::<f64>().ok().map(|number| number * 1024_f64.powi(power));
    match scaled {
        Some(bytes) if bytes >= 0.0 && bytes < i64::MAX as f64 => Ok(bytes as u64),
        _ => Err("write a size such as 512, 100K, 1.5M or 2G".into()),
    }
}

/// Bytes per second. As for rsync, a number alone is KiB, and 0 means unlimited.
fn rate(text: &str) -> Result<u64, String> {
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    size(text).map(|bytes| if is_number { bytes.saturating_mul(1024) } else { bytes })
}

fn streams(text: &str) -> Result<StreamCount, String> {
    match text {
        "auto" => Ok(StreamCount::Auto),
        _ => match text.parse() {
            Ok(count @ 0..=STREAMS_MAX) => Ok(StreamCount::Exactly(count)),
            _ => Err(format!("write auto, or a number up to {STREAMS_MAX}")),
        },
    }
}

fn ports(text: &str) -> Result<RangeInclusive<u16>, String> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    match (first.parse(), last.parse()) {
        (Ok(first @ 1..), Ok(last)) if first <= last => Ok(first..=last),
        _ => Err("write a port, or the first and the last port, such as 5000-5010".into()),
    }
}

impl TransferOptions {
    /// The options of the transfer.
    pub fn options(&self) -> Result<Options, Failure> {
        let mut options = Options::default();
        options.preserve = self.preserve();
        options.replacement = Replacement {
            ignores_times: self.ignore_times,
            size_only: self.size_only,
            keeps_newer: self.update,
            keeps_existing: self.ignore_existing,
            keeps_folders: false,
            only_existing: self.existing,
        };
        options.selection = Selection {
            filter: self.filters.filter()?,
            size_min: self.min_size.unwrap_or(0),
            size_max: self.max_size,
            one_file_system: self.one_file_system,
            relative: self.relative || self.list.is_given(),
            follow_links: self.copy_links,
        };
        options.deletion.mode = match self.delete {
            None if !self.delete_excluded => DeletionMode::No,
            None | Some(DeleteArgument::Brake) => DeletionMode::Brake,
            Some(DeleteArgument::All) => DeletionMode::All,
        };
        options.deletion.deletes_excluded = self.delete_excluded;
        if options.deletion.mode != DeletionMode::No && !options.preserve.recursive {
            let problem = if self.list.is_given() {
                "--delete needs the content of directories: add -r, which --files-from turns off"
            } else {
                "--delete needs the content of directories: add -r or -a"
            };
            return Err(Failure::bad_input(problem));
        }
        if self.link_dest.len() > EARLIER_COPIES_MAX {
            let problem = format!("--link-dest may be given {EARLIER_COPIES_MAX} times");
            return Err(Failure::bad_input(problem));
        }
        options.earlier_copies =
            self.link_dest.iter().map(|path| path.as_bytes().to_vec()).collect();
        options.compress = self.compress;
        options.rate_max = self.bwlimit.unwrap_or(0);
        options.dry_run = self.dry_run;
        options.delta = match self.delta {
            None => Delta::No,
            Some(DeltaArgument::Fixed) => Delta::Fixed,
            Some(DeltaArgument::Rolling) => Delta::Rolling,
        };
        options.verify = match self.verify {
            VerifyArgument::Crc64 => Verify::Crc64,
            VerifyArgument::Blake3 => Verify::Blake3,
        };
        options.durable = match self.durable {
            DurableArgument::Batch => Durable::Batch,
            DurableArgument::Each => Durable::Each,
            DurableArgument::No => Durable::No,
        };
        Ok(options)
    }

    /// Whether the progress is printed without a terminal.
    pub fn shows_progress(&self) -> bool {
        self.progress
    }

    /// The command on the other host that starts haul; `None`: what a script finds, or a copy of
    /// this program.
    pub fn remote_program(&self) -> Option<OsString> {
        let installed = || self.no_bring.then(|| "haul".into());
        self.remote_haul.clone().or_else(installed)
    }

    /// What is wanted of direct connections; `None` for ssh alone.
    pub fn direct(&self) -> Option<DirectSettings> {
        let is_wanted = self.streams != StreamCount::Exactly(0) && !self.dry_run;
        is_wanted.then(|| DirectSettings {
            streams: self.streams,
            is_plain: self.plain,
            ports: self.data_port.clone().unwrap_or(0..=0),
            from: match self.data_from {
                DataFromArgument::Here => DataFrom::Here,
                DataFromArgument::There => DataFrom::There,
            },
        })
    }

    fn preserve(&self) -> Preserve {
        let archive = self.archive;
        let chosen = Preserve {
            recursive: archive || self.recursive,
            links: archive || self.links,
            permissions: archive || self.perms || self.acls,
            times: archive || self.times,
            owner: archive || self.owner,
            group: archive || self.group,
            specials: archive || self.devices,
            hard_links: self.hard_links,
            acls: self.acls,
            xattrs: self.xattrs,
        };
        let mut preserve = if chosen == Preserve::NOTHING { Preserve::ALL } else { chosen };
        // As by rsync, a list names what is copied, and -a does not add the content of directories.
        preserve.recursive &= !self.list.is_given() || self.recursive;
        preserve
    }

    /// The command that runs a command on the other host, with its arguments.
    pub fn shell(&self) -> Result<Vec<OsString>, Failure> {
        let Some(command) = &self.rsh else { return Ok(vec!["ssh".into()]) };
        let words: Vec<OsString> = shlex::split(command)
            .ok_or_else(|| Failure::bad_input(format!("rsh {command:?}: a quote is not closed")))?
            .into_iter()
            .map(Into::into)
            .collect();
        if words.is_empty() {
            return Err(Failure::bad_input("rsh is empty: write ssh -p 2222, for example"));
        }
        Ok(words)
    }
}
