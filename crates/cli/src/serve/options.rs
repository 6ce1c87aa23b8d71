//! The options of `haul serve`: the same on the command line and in a file.

use super::messages::MessageFormat;
use crate::output::Failure;
use clap::{Args, ValueEnum};
use haul::{MethodChoice, Plan, SendMethod};
use haul_bench::quantity::Size;
use haul_serve::{AccessLog, Address, BasicAuth, Config, Limits, LogFormat, Symlinks, Tls};
use serde::{Deserialize, Deserializer, de::Error as _};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

/// The largest file that clients may put here, unless told otherwise.
const PUT_BYTES_MAX: u64 = 1 << 30;

/// What `haul serve` can be told. A file has the same names, as TOML keys; what the command line says comes first.
#[derive(Debug, Default, Args, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Options {
    /// The folder whose files are served
    #[arg(value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Where to listen: a port, an address with one, unix:PATH, or systemd for the sockets it hands over;
    /// may be given again [default: 8080]
    #[arg(long, value_name = "ADDRESS")]
    #[serde(deserialize_with = "parsed_list")]
    pub listen: Vec<Address>,
    /// Where to listen for TLS; may be given again
    #[arg(long, help_heading = "TLS and passwords", value_name = "ADDRESS")]
    #[serde(deserialize_with = "parsed_list")]
    pub tls_listen: Vec<Address>,
    /// The certificate and those that lead from it to a known one: a PEM file, read again at SIGHUP
    #[arg(long, help_heading = "TLS and passwords", value_name = "FILE")]
    pub tls_certificate: Option<PathBuf>,
    /// The certificate's key: a PEM file
    #[arg(long, help_heading = "TLS and passwords", value_name = "FILE")]
    pub tls_key: Option<PathBuf>,
    /// Let the kernel encrypt where it can (kTLS) [default: true]
    #[arg(long, help_heading = "TLS and passwords", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "true|false", hide_possible_values = true)]
    pub ktls: Option<bool>,
    /// Ask for a name and a password from this file of bcrypt hashes, written by htpasswd -B and read again at SIGHUP
    #[arg(long, help_heading = "TLS and passwords", value_name = "FILE")]
    pub auth_file: Option<PathBuf>,
    /// What people are told that the password is for [default: haul]
    #[arg(long, help_heading = "TLS and passwords", value_name = "TEXT")]
    pub auth_realm: Option<String>,
    /// Names that stand for their folder, separated by commas [default: index.html]
    #[arg(long, help_heading = "Files", value_name = "NAME,…", value_delimiter = ',')]
    pub index: Vec<String>,
    /// List folders that have no index file
    #[arg(long, help_heading = "Files", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "true|false", hide_possible_values = true)]
    pub listing: Option<bool>,
    /// Serve names that begin with a dot too; .well-known is served anyway
    #[arg(long, help_heading = "Files", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "true|false", hide_possible_values = true)]
    pub hidden: Option<bool>,
    /// Where symbolic links may lead: inside the folder, nowhere (never), or anywhere [default: inside]
    #[arg(
        long,
        help_heading = "Files",
        value_name = "WHERE",
        value_enum,
        hide_possible_values = true
    )]
    pub symlinks: Option<LinkPolicy>,
    /// Send x.br, x.zst or x.gz for x to whoever accepts it
    #[arg(long, help_heading = "Files", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "true|false", hide_possible_values = true)]
    pub precompressed: Option<bool>,
    /// A file in the folder to send for every address that names none, for applications that live in one page
    #[arg(long, help_heading = "Files", value_name = "FILE")]
    pub fallback: Option<String>,
    /// A file in the folder to show with a status, such as 404=/404.html; may be given again
    #[arg(long, help_heading = "Files", value_name = "STATUS=FILE")]
    pub error_page: Vec<String>,
    /// Let clients put files here (PUT): whoever reaches the service may then write
    #[arg(long, help_heading = "Uploads", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "true|false", hide_possible_values = true)]
    pub allow_put: Option<bool>,
    /// The largest file that clients may put here [default: 1GiB]
    #[arg(long, help_heading = "Uploads", value_name = "SIZE")]
    #[serde(deserialize_with = "parsed")]
    pub put_limit: Option<Size>,
    /// A field for every response, such as 'X-Frame-Options: DENY'; may be given again
    #[arg(long, help_heading = "Responses", value_name = "NAME: VALUE")]
    pub header: Vec<String>,
    /// Cache-Control for files that a pattern fits, such as '*.html=no-cache' or 'assets/**=max-age=31536000, immutable'; may
    /// be given again, and the first that fits counts
    #[arg(long, help_heading = "Responses", value_name = "PATTERN=VALUE")]
    pub cache_control: Vec<String>,
    /// Origins whose scripts may read responses, separated by commas; * is everybody's
    #[arg(long, help_heading = "Responses", value_name = "ORIGIN,…", value_delimiter = ',')]
    pub cors: Vec<String>,
    /// Log requests to this file; - is standard output
    #[arg(long, help_heading = "Logs and metrics", value_name = "FILE")]
    pub access_log: Option<PathBuf>,
    /// How requests are logged: common, combined or json [default: combined]
    #[arg(
        long,
        help_heading = "Logs and metrics",
        value_name = "FORMAT",
        value_enum,
        hide_possible_values = true
    )]
    pub log_format: Option<Format>,
    /// How haul says what happens to itself, on standard error: text or json [default: text]
    #[arg(
        long,
        help_heading = "Logs and metrics",
        value_name = "FORMAT",
        value_enum,
        hide_possible_values = true
    )]
    pub message_format: Option<MessageFormat>,
    /// Answer Prometheus (/metrics) at this address and port
    #[arg(long, help_heading = "Logs and metrics", value_name = "ADDRESS")]
    pub metrics_listen: Option<SocketAddr>,
    /// Who to be once everything is open, for a service that root starts
    #[arg(long, help_heading = "Privileges", value_name = "NAME")]
    pub user: Option<String>,
    /// Give up every file that is not served, where the kernel has Landlock [default: true]
    #[arg(long, help_heading = "Privileges", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "true|false", hide_possible_values = true)]
    pub confine: Option<bool>,
    /// Connections at a time [default: 65536, or what the limit on open files allows]
    #[arg(long, help_heading = "Limits", value_name = "N")]
    pub max_connections: Option<usize>,
    /// The longest head of a request [default: 16KiB]
    #[arg(long, help_heading = "Limits", value_name = "SIZE")]
    #[serde(deserialize_with = "parsed")]
    pub head_limit: Option<Size>,
    /// How long a request's head may take to arrive [default: 30s]
    #[arg(long, help_heading = "Limits", value_name = "TIME")]
    #[serde(deserialize_with = "parsed")]
    pub head_timeout: Option<Time>,
    /// How long a connection may lie idle between two requests [default: 75s]
    #[arg(long, help_heading = "Limits", value_name = "TIME")]
    #[serde(deserialize_with = "parsed")]
    pub idle_timeout: Option<Time>,
    /// How long a client may take nothing of what is being sent [default: 60s]
    #[arg(long, help_heading = "Limits", value_name = "TIME")]
    #[serde(deserialize_with = "parsed")]
    pub send_timeout: Option<Time>,
    /// How long responses under way may take after SIGTERM [default: 30s]
    #[arg(long, help_heading = "Limits", value_name = "TIME")]
    #[serde(deserialize_with = "parsed")]
    pub drain_timeout: Option<Time>,
    /// The most that one connection is sent in a second
    #[arg(long, help_heading = "Limits", value_name = "SIZE")]
    #[serde(deserialize_with = "parsed")]
    pub rate_limit: Option<Size>,
    /// Files to keep open [default: 4096, or what the limit on open files allows]
    #[arg(long, help_heading = "Limits", value_name = "N")]
    pub cached_files: Option<usize>,
    /// Memory to keep small files in [default: 64MiB]
    #[arg(long, help_heading = "Limits", value_name = "SIZE")]
    #[serde(deserialize_with = "parsed")]
    pub cache_memory: Option<Size>,
    /// Event loops [default: one for each CPU]
    #[arg(long, help_heading = "How bytes go", value_name = "N")]
    pub workers: Option<usize>,
    /// The path that files take to the socket, such as sendfile [default: auto, the cheapest]
    #[arg(long, help_heading = "How bytes go", value_name = "PATH")]
    pub path: Option<String>,
    /// A plan of haul plan to choose the path by
    #[arg(long, help_heading = "How bytes go", value_name = "FILE")]
    pub plan: Option<PathBuf>,
    /// The sockets' congestion control [default: the machine's]
    #[arg(long, help_heading = "How bytes go", value_name = "NAME")]
    pub congestion: Option<String>,
}

/// Where symbolic links may lead.
#[derive(Debug, Clone, Copy, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LinkPolicy {
    Inside,
    Never,
    Anywhere,
}

/// How requests are logged.
#[derive(Debug, Clone, Copy, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    Common,
    Combined,
    Json,
}

/// A time of a second or more.
#[derive(Debug, Clone, Copy)]
pub struct Time(Duration);

impl FromStr for Time {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const DAY: Duration = Duration::from_secs(24 * 3600);
        let wrong = || format!("{text:?} is not a time from 1s to 24h: write 30s or 2m");
        let time: jiff::SignedDuration = text.parse().map_err(|_| wrong())?;
        let time = Duration::try_from(time).map_err(|_| wrong())?;
        (Duration::from_secs(1)..=DAY).contains(&time).then_some(Self(time)).ok_or_else(wrong)
    }
}

impl Options {
    /// Options from the text of a file.
    pub fn parse(text: &str) -> Result<Self, String> {
        toml::from_str(text).map_err(|error| {
            let line = error
                .span()
                .map(|span| text[..span.start.min(text.len())].matches('\n').count() + 1);
            let message = error.message().replace('\n', ": ");
            line.map_or(message.clone(), |line| format!("line {line}: {message}"))
        })
    }

    /// These, and `other` where these say nothing.
    pub fn or(self, other: Self) -> Self {
        fn list<T>(one: Vec<T>, other: Vec<T>) -> Vec<T> {
            if one.is_empty() { other } else { one }
        }
        Self {
            dir: self.dir.or(other.dir),
            listen: list(self.listen, other.listen),
            tls_listen: list(self.tls_listen, other.tls_listen),
            tls_certificate: self.tls_certificate.or(other.tls_certificate),
            tls_key: self.tls_key.or(other.tls_key),
            ktls: self.ktls.or(other.ktls),
            auth_file: self.auth_file.or(other.auth_file),
            auth_realm: self.auth_realm.or(other.auth_realm),
            workers: self.workers.or(other.workers),
            index: list(self.index, other.index),
            listing: self.listing.or(other.listing),
            hidden: self.hidden.or(other.hidden),
            symlinks: self.symlinks.or(other.symlinks),
            precompressed: self.precompressed.or(other.precompressed),
            fallback: self.fallback.or(other.fallback),
            error_page: list(self.error_page, other.error_page),
            allow_put: self.allow_put.or(other.allow_put),
            put_limit: self.put_limit.or(other.put_limit),
            header: list(self.header, other.header),
            cache_control: list(self.cache_control, other.cache_control),
            cors: list(self.cors, other.cors),
            access_log: self.access_log.or(other.access_log),
            log_format: self.log_format.or(other.log_format),
            message_format: self.message_format.or(other.message_format),
            metrics_listen: self.metrics_listen.or(other.metrics_listen),
            user: self.user.or(other.user),
            confine: self.confine.or(other.confine),
            max_connections: self.max_connections.or(other.max_connections),
            head_limit: self.head_limit.or(other.head_limit),
            head_timeout: self.head_timeout.or(other.head_timeout),
            idle_timeout: self.idle_timeout.or(other.idle_timeout),
            send_timeout: self.send_timeout.or(other.send_timeout),
            drain_timeout: self.drain_timeout.or(other.drain_timeout),
            rate_limit: self.rate_limit.or(other.rate_limit),
            cached_files: self.cached_files.or(other.cached_files),
            cache_memory: self.cache_memory.or(other.cache_memory),
            path: self.path.or(other.path),
            plan: self.plan.or(other.plan),
            congestion: self.congestion.or(other.congestion),
        }
    }

    /// What the service takes.
    pub fn into_config(self) -> Result<Config, Failure> {
        check_pairs(&self)?;
        let dir = self
            .dir
            .ok_or_else(|| Failure::bad_input("no folder to serve: name one, haul serve DIR"))?;
        let mut config = Config::new(dir);
        // Who names an address for TLS alone does not want another.
        if !self.listen.is_empty() || !self.tls_listen.is_empty() {
            config.listen = self.listen;
        }
        config.tls = match (self.tls_certificate, self.tls_key, self.tls_listen) {
            (None, None, listen) if listen.is_empty() => None,
            (Some(certificate), Some(key), listen) if !listen.is_empty() => {
                Some(Tls { listen, certificate, key, in_kernel: self.ktls.unwrap_or(true) })
            }
            _ => {
                let needs =
                    "tls-listen, tls-certificate and tls-key belong together: give all three";
                return Err(Failure::bad_input(needs));
            }
        };
        let realm = self.auth_realm.unwrap_or_else(|| "haul".into());
        config.basic_auth = self.auth_file.map(|file| BasicAuth { file, realm });
        at_least_one("rate-limit", self.rate_limit.map(|size| size.0 as usize))?;
        at_least_one("workers", self.workers)?;
        at_least_one("max-connections", self.max_connections)?;
        config.workers = self.workers;
        let content = &mut config.content;
        if !self.index.is_empty() {
            content.index = self.index;
        }
        content.listing = self.listing.unwrap_or(content.listing);
        content.hidden = self.hidden.unwrap_or(content.hidden);
        content.precompressed = self.precompressed.unwrap_or(content.precompressed);
        content.fallback = self.fallback;
        content.symlinks = match self.symlinks {
            None | Some(LinkPolicy::Inside) => Symlinks::Inside,
            Some(LinkPolicy::Never) => Symlinks::Never,
            Some(LinkPolicy::Anywhere) => Symlinks::Anywhere,
        };
        for text in &self.error_page {
            let (status, file) = split("error-page", text, '=', "404=/404.html")?;
            let status = status.parse().map_err(|_| {
                Failure::bad_input(format!(
                    "error-page {text:?}: {status:?} is no status, such as 404"
                ))
            })?;
            content.error_pages.push((status, file));
        }
        for text in &self.header {
            config.fields.headers.push(split("header", text, ':', "X-Frame-Options: DENY")?);
        }
        for text in &self.cache_control {
            config.fields.cache_control.push(split("cache-control", text, '=', "*.html=no-cache")?);
        }
        if let Some(wrong) = self.cors.iter().find(|origin| !is_origin(origin)) {
            return Err(Failure::bad_input(format!(
                "cors {wrong:?} is no origin as browsers say it: write \"https://example.com\", with the port where it is not the usual one, \
                 without a path, or \"*\""
            )));
        }
        config.fields.cors = self.cors;
        config.access_log = self.access_log.map(|path| AccessLog {
            path: (path.as_os_str() != "-").then_some(path),
            format: match self.log_format {
                Some(Format::Common) => LogFormat::Common,
                None | Some(Format::Combined) => LogFormat::Combined,
                Some(Format::Json) => LogFormat::Json,
            },
        });
        let put_bytes_max = self.put_limit.map_or(PUT_BYTES_MAX, |size| size.0);
        config.put_bytes_max = self.allow_put.unwrap_or(false).then_some(put_bytes_max);
        config.metrics = self.metrics_listen;
        config.user = self.user;
        config.confine = self.confine.unwrap_or(true);
        let limits = &mut config.limits;
        *limits = Limits {
            connections_max: self.max_connections.unwrap_or(limits.connections_max),
            head_bytes_max: head_limit(self.head_limit)?.unwrap_or(limits.head_bytes_max),
            head_timeout: self.head_timeout.map_or(limits.head_timeout, |time| time.0),
            idle_timeout: self.idle_timeout.map_or(limits.idle_timeout, |time| time.0),
            send_timeout: self.send_timeout.map_or(limits.send_timeout, |time| time.0),
            drain_timeout: self.drain_timeout.map_or(limits.drain_timeout, |time| time.0),
            rate_bytes_per_second: self.rate_limit.map(|size| size.0),
            cached_files_max: self.cached_files.unwrap_or(limits.cached_files_max),
            cached_bytes_max: self
                .cache_memory
                .map_or(limits.cached_bytes_max, |size| size.0 as usize),
        };
        config.choice = choice(self.path.as_deref(), self.plan.as_deref())?;
        config.congestion = self.congestion;
        Ok(config)
    }
}

fn at_least_one(name: &str, number: Option<usize>) -> Result<(), Failure> {
    if number == Some(0) {
        Err(Failure::bad_input(format!("{name} is 0: nobody would be served")))
    } else {
        Ok(())
    }
}

/// Options that mean nothing without another.
fn check_pairs(options: &Options) -> Result<(), Failure> {
    let pairs = [
        (options.log_format.is_some() && options.access_log.is_none(), "log-format", "access-log"),
        (options.auth_realm.is_some() && options.auth_file.is_none(), "auth-realm", "auth-file"),
        (options.put_limit.is_some() && options.allow_put != Some(true), "put-limit", "allow-put"),
    ];
    match pairs.iter().find(|(is_alone, ..)| *is_alone) {
        Some((_, name, other)) => {
            Err(Failure::bad_input(format!("{name} means nothing without {other}")))
        }
        None => Ok(()),
    }
}

fn head_limit(size: Option<Size>) -> Result<Option<usize>, Failure> {
    let Some(Size(bytes)) = size else { return Ok(None) };
    if (256..=1 << 20).contains(&bytes) {
        Ok(Some(bytes as usize))
    } else {
        Err(Failure::bad_input(format!("head-limit {bytes} B is not from 256B to 1MiB")))
    }
}

/// Whether a browser could say that a page comes from there (RFC 6454 section 6.2).
fn is_origin(text: &str) -> bool {
    let host = text.split_once("://").map_or("", |(_, host)| host);
    text == "*" || text == "null" || (!host.is_empty() && !host.contains(['/', '?', '#', '@', ' ']))
}

fn split(name: &str, text: &str, at: char, example: &str) -> Result<(String, String), Failure> {
    text.split_once(at)
        .map(|(before, after)| (before.trim().to_owned(), after.trim().to_owned()))
        .ok_or_else(|| {
            Failure::bad_input(format!("{name} {text:?} has no {at:?}: write {example:?}"))
        })
}

fn choice(path: Option<&str>, plan: Option<&std::path::Path>) -> Result<MethodChoice, Failure> {
    match (path, plan) {
        (None | Some("auto"), None) => Ok(MethodChoice::Builtin),
        (None | Some("auto"), Some(plan)) => {
            let plan = Plan::load(plan).map_err(Failure::bad_input)?;
            Ok(MethodChoice::Plan(Arc::new(plan)))
        }
        (Some(_), Some(_)) => Err(Failure::bad_input("path and plan: give one of them, not both")),
        (Some(path), None) => {
            let path: SendMethod = path.parse().map_err(Failure::bad_input)?;
            Ok(MethodChoice::Method(path))
        }
    }
}

/// A value that is written as on the command line.
fn parsed<'de, T: FromStr<Err: std::fmt::Display>, D: Deserializer<'de>>(
    from: D,
) -> Result<Option<T>, D::Error> {
    String::deserialize(from)?.parse().map(Some).map_err(D::Error::custom)
}

/// One such value, or a list of them.
fn parsed_list<'de, T: FromStr<Err: std::fmt::Display>, D: Deserializer<'de>>(
    from: D,
) -> Result<Vec<T>, D::Error> {
    let texts = Vec::<String>::deserialize(from)?;
    texts.iter().map(|text| text.parse().map_err(D::Error::custom)).collect()
}
