//! The options of `haul push` and `haul pull`, with rsync's letters.

use crate::output::Failure;
use clap::{Args, ValueEnum};
use haul_transfer::{
    DataFrom, DirectSettings, Durable, Options, Preserve, STREAMS_MAX, StreamCount, Verify,
};
use std::ffi::OsString;
use std::ops::RangeInclusive;

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
    /// Change nothing, and count what would be sent
    #[arg(short = 'n', long)]
    pub dry_run: bool,
    /// Print nothing but errors
    #[arg(short = 'q', long)]
    pub quiet: bool,
    /// Command that runs a command on the other host [default: ssh]
    #[arg(short = 'e', long, value_name = "COMMAND")]
    pub rsh: Option<String>,
    /// Command on the other host that starts haul
    #[arg(long, visible_alias = "rsync-path", value_name = "PROGRAM", default_value = "haul")]
    pub remote_haul: OsString,
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
    pub fn options(&self) -> Options {
        let mut options = Options::default();
        options.preserve = self.preserve();
        options.ignore_times = self.ignore_times;
        options.dry_run = self.dry_run;
        options.verify = match self.verify {
            VerifyArgument::Crc64 => Verify::Crc64,
            VerifyArgument::Blake3 => Verify::Blake3,
        };
        options.durable = match self.durable {
            DurableArgument::Batch => Durable::Batch,
            DurableArgument::Each => Durable::Each,
            DurableArgument::No => Durable::No,
        };
        options
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
        if chosen == Preserve::NOTHING { Preserve::ALL } else { chosen }
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
