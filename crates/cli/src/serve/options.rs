//! The options of `haul serve`: the same on the command line and in the configuration file.

use crate::daemon::messages::MessageFormat;
use crate::daemon::options::{
    ByteRate, Count, MetricsAddress, SocketMode, Timeout, deserialize_each_from_text,
    deserialize_from_text,
};
use crate::output::Failure;
use clap::{Args, ValueEnum};
use haul::{MethodChoice, Plan, SendMethod};
use haul_serve::{
    AccessLog, Address, BasicAuth, Config, ContentRules, EntityTags, ExtraFields, FileUpdates,
    Limits, LogFormat, Symlinks, Tls, TrustedProxies, TrustedProxy,
};
use haul_units::Size;
use serde::Deserialize;
use std::path::PathBuf;
use std::sync::Arc;

/// Default maximum size of an uploaded file, in bytes.
const PUT_BYTES_MAX: u64 = 1 << 30;

/// The options of `haul serve`. The configuration file has the flags' names as TOML keys, and flags
/// take precedence.
#[derive(Debug, Default, Args, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Options {
    /// Directory whose files are served
    #[arg(value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Address to listen on for HTTP: a port, an address and port, unix:PATH, or systemd for the
    /// sockets that systemd passes; may be repeated [default: 8080]
    #[arg(long, value_name = "ADDRESS")]
    #[serde(deserialize_with = "deserialize_each_from_text")]
    pub listen: Vec<Address>,
    /// Mode of the files of Unix sockets to listen on, in octal: who may connect, such as 660
    /// [default: 666]
    #[arg(long, value_name = "MODE")]
    #[serde(deserialize_with = "deserialize_from_text")]
    pub socket_mode: Option<SocketMode>,
    /// Networks of proxies that name the client at the start of each connection (PROXY protocol),
    /// separated by commas, such as 10.0.0.0/8,192.0.2.1; unix for all clients of Unix sockets
    #[arg(long, value_name = "NETWORK,…", value_delimiter = ',')]
    #[serde(deserialize_with = "deserialize_each_from_text")]
    pub trusted_proxies: Vec<TrustedProxy>,
    /// Address to listen on for HTTPS, as for --listen; may be repeated
    #[arg(long, help_heading = "TLS and passwords", value_name = "ADDRESS")]
    #[serde(deserialize_with = "deserialize_each_from_text")]
    pub tls_listen: Vec<Address>,
    /// PEM file of the certificate and its intermediate certificates; read again by a reload
    #[arg(long, help_heading = "TLS and passwords", value_name = "FILE")]
    pub tls_certificate: Option<PathBuf>,
    /// PEM file of the certificate's private key
    #[arg(long, help_heading = "TLS and passwords", value_name = "FILE")]
    pub tls_key: Option<PathBuf>,
    /// Encrypt in the kernel where it supports that (kTLS) [default: true]
    #[arg(long, help_heading = "TLS and passwords")]
    pub ktls: Option<bool>,
    /// Require a user name and password from this file of bcrypt hashes, which htpasswd -B writes;
    /// read again by a reload
    #[arg(long, help_heading = "TLS and passwords", value_name = "FILE")]
    pub auth_file: Option<PathBuf>,
    /// Realm that browsers show when they ask for the password [default: haul]
    #[arg(long, help_heading = "TLS and passwords", value_name = "TEXT")]
    pub auth_realm: Option<String>,
    /// Names of index files, separated by commas; the first that exists is sent for its directory
    /// [default: index.html]
    #[arg(long, help_heading = "Files", value_name = "NAME,…", value_delimiter = ',')]
    pub index: Vec<String>,
    /// List the contents of directories that have no index file
    #[arg(long, help_heading = "Files")]
    pub listing: Option<bool>,
    /// Serve names that begin with a dot; .well-known is always served
    #[arg(long, help_heading = "Files")]
    pub hidden: Option<bool>,
    /// Targets that symbolic links may have: inside the served directory (inside), none (never), or
    /// anywhere [default: inside]
    #[arg(
        long,
        help_heading = "Files",
        value_name = "WHERE",
        value_enum,
        hide_possible_values = true
    )]
    pub symlinks: Option<LinkPolicy>,
    /// Send x.br, x.zst or x.gz instead of x to clients that accept that coding
    #[arg(long, help_heading = "Files")]
    pub precompressed: Option<bool>,
    /// Files are only ever replaced, by renaming a complete file to their name, and never written
    /// in place: send them without a copy from the first request on
    #[arg(long, help_heading = "Files")]
    pub replaced_by_rename: Option<bool>,
    /// Other servers have copies of the files with the same times: give each copy the same entity
    /// tag, made of the time and the size
    #[arg(long, help_heading = "Files")]
    pub replicated: Option<bool>,
    /// File in the served directory to send for every path that names no file, for single-page
    /// applications
    #[arg(long, help_heading = "Files", value_name = "FILE")]
    pub fallback: Option<String>,
    /// File in the served directory to send with an error status, such as 404=/404.html; may be
    /// repeated
    #[arg(long, help_heading = "Files", value_name = "STATUS=FILE")]
    pub error_page: Vec<String>,
    /// Accept uploads (PUT): every client that can reach the service may then write files
    #[arg(long, help_heading = "Uploads")]
    pub allow_put: Option<bool>,
    /// Maximum size of an uploaded file [default: 1GiB]
    #[arg(long, help_heading = "Uploads", value_name = "SIZE")]
    #[serde(deserialize_with = "deserialize_from_text")]
    pub put_limit: Option<Size>,
    /// Header field to add to every response, such as 'X-Frame-Options: DENY'; may be repeated
    #[arg(long, help_heading = "Responses", value_name = "NAME: VALUE")]
    pub header: Vec<String>,
    /// Cache-Control value for files that match a pattern, such as '*.html=no-cache' or
    /// 'assets/**=max-age=31536000, immutable'; may be repeated; the first match is used
    #[arg(long, help_heading = "Responses", value_name = "PATTERN=VALUE")]
    pub cache_control: Vec<String>,
    /// Origins whose scripts may read responses (CORS), separated by commas; * allows every origin
    #[arg(long, help_heading = "Responses", value_name = "ORIGIN,…", value_delimiter = ',')]
    pub cors: Vec<String>,
    /// Log requests to this file; - is standard output
    #[arg(long, help_heading = "Logs and metrics", value_name = "FILE")]
    pub access_log: Option<PathBuf>,
    /// Format of the access log: common, combined or json [default: combined]
    #[arg(
        long,
        help_heading = "Logs and metrics",
        value_name = "FORMAT",
        value_enum,
        hide_possible_values = true
    )]
    pub log_format: Option<AccessLogFormat>,
    /// Format of the service's own messages on standard error: text or json [default: text]
    #[arg(
        long,
        help_heading = "Logs and metrics",
        value_name = "FORMAT",
        value_enum,
        hide_possible_values = true
    )]
    pub message_format: Option<MessageFormat>,
    /// Unix socket at which haul serve control commands this server, for this user and root alone
    #[arg(long, help_heading = "Logs and metrics", value_name = "PATH")]
    pub control: Option<PathBuf>,
    /// Address and port on which to serve metrics for Prometheus (/metrics)
    #[arg(long, help_heading = "Logs and metrics", value_name = "ADDRESS")]
    #[serde(deserialize_with = "deserialize_from_text")]
    pub metrics_listen: Option<MetricsAddress>,
    /// User to switch to once all files and sockets are open, for a service that root starts
    #[arg(long, help_heading = "Privileges", value_name = "NAME")]
    pub user: Option<String>,
    /// Give up access to files that are not served, where the kernel has Landlock [default: true]
    #[arg(long, help_heading = "Privileges")]
    pub confine: Option<bool>,
    /// Maximum number of open connections [default: 65536, or what the limit on open files allows]
    #[arg(long, help_heading = "Limits", value_name = "N")]
    pub max_connections: Option<Count>,
    /// Maximum number of open connections of one IPv4 address, or of one IPv6 network of 64 bits.
    /// Behind a proxy all clients have its address, unless --trusted-proxies names it [default: no
    /// limit]
    #[arg(long, help_heading = "Limits", value_name = "N")]
    pub max_connections_per_address: Option<Count>,
    /// Maximum size of the head of a request [default: 16KiB]
    #[arg(long, help_heading = "Limits", value_name = "SIZE")]
    #[serde(deserialize_with = "deserialize_from_text")]
    pub head_limit: Option<Size>,
    /// Maximum time for the head of a request to arrive [default: 30s]
    #[arg(long, help_heading = "Limits", value_name = "TIME")]
    #[serde(deserialize_with = "deserialize_from_text")]
    pub head_timeout: Option<Timeout>,
    /// Maximum time that a connection may be idle between two requests [default: 75s]
    #[arg(long, help_heading = "Limits", value_name = "TIME")]
    #[serde(deserialize_with = "deserialize_from_text")]
    pub idle_timeout: Option<Timeout>,
    /// Maximum time for which a client may accept none of the data being sent [default: 60s]
    #[arg(long, help_heading = "Limits", value_name = "TIME")]
    #[serde(deserialize_with = "deserialize_from_text")]
    pub send_timeout: Option<Timeout>,
    /// Maximum time for open requests to finish after SIGTERM [default: 30s]
    #[arg(long, help_heading = "Limits", value_name = "TIME")]
    #[serde(deserialize_with = "deserialize_from_text")]
    pub drain_timeout: Option<Timeout>,
    /// Maximum rate at which each connection is sent data, in bytes per second
    #[arg(long, help_heading = "Limits", value_name = "SIZE")]
    #[serde(deserialize_with = "deserialize_from_text")]
    pub rate_limit: Option<ByteRate>,
    /// Maximum number of files kept open [default: 4096, or what the limit on open files allows]
    #[arg(long, help_heading = "Limits", value_name = "N")]
    pub cached_files: Option<usize>,
    /// Maximum memory for cached small files [default: 64MiB]
    #[arg(long, help_heading = "Limits", value_name = "SIZE")]
    #[serde(deserialize_with = "deserialize_from_text")]
    pub cache_memory: Option<Size>,
    /// Number of event loops [default: one for each CPU]
    #[arg(long, help_heading = "Sending", value_name = "N")]
    pub workers: Option<Count>,
    /// Path (send method) for files, such as sendfile [default: auto, the cheapest]
    #[arg(long, help_heading = "Sending", value_name = "PATH")]
    pub path: Option<String>,
    /// Plan file of haul plan by which to choose the path
    #[arg(long, help_heading = "Sending", value_name = "FILE")]
    pub plan: Option<PathBuf>,
    /// Congestion control of the sockets [default: the machine's]
    #[arg(long, help_heading = "Sending", value_name = "NAME")]
    pub congestion: Option<String>,
    /// Clamp the congestion window of peers within a millisecond, which saves interrupts on some
    /// machines: compare with your own load; needs CAP_BPF and CAP_NET_ADMIN [default: false]
    #[arg(long, help_heading = "Sending")]
    pub window_clamp: Option<bool>,
}

/// The targets that symbolic links may have.
#[derive(Debug, Clone, Copy, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LinkPolicy {
    Inside,
    Never,
    Anywhere,
}

/// The format of the access log.
#[derive(Debug, Clone, Copy, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AccessLogFormat {
    Common,
    Combined,
    Json,
}

impl Options {
    /// Converts the options to the configuration of a server.
    pub fn into_config(self) -> Result<Config, Failure> {
        check_dependencies(&self)?;
        let dir = self
            .dir
            .clone()
            .ok_or_else(|| Failure::bad_input("no directory to serve: name one, haul serve DIR"))?;
        let mut config = Config::new(dir);
        self.set_content(&mut config.content)?;
        self.set_limits(&mut config.limits)?;
        config.fields = self.extra_fields()?;
        // If only TLS addresses are given, the default HTTP address is not used.
        if !self.listen.is_empty() || !self.tls_listen.is_empty() {
            config.listen = self.listen;
        }
        config.tls = match (self.tls_certificate, self.tls_key, self.tls_listen) {
            (None, None, listen) if listen.is_empty() => None,
            (Some(certificate), Some(key), listen) if !listen.is_empty() => {
                Some(Tls::new(listen, certificate, key, self.ktls.unwrap_or(true)))
            }
            _ => {
                let message =
                    "tls-listen, tls-certificate and tls-key require each other: give all three";
                return Err(Failure::bad_input(message));
            }
        };
        let realm = self.auth_realm.unwrap_or_else(|| "haul".into());
        config.basic_auth = self.auth_file.map(|file| BasicAuth::new(file, realm));
        config.workers = self.workers.map(Count::get);
        config.trusted_proxies = TrustedProxies::new(self.trusted_proxies);
        config.access_log = self.access_log.map(|path| {
            AccessLog::new(
                (path.as_os_str() != "-").then_some(path),
                match self.log_format {
                    Some(AccessLogFormat::Common) => LogFormat::Common,
                    None | Some(AccessLogFormat::Combined) => LogFormat::Combined,
                    Some(AccessLogFormat::Json) => LogFormat::Json,
                },
            )
        });
        let put_bytes_max = self.put_limit.map_or(PUT_BYTES_MAX, |size| size.0);
        config.put_bytes_max = self.allow_put.unwrap_or(false).then_some(put_bytes_max);
        config.metrics = self.metrics_listen.map(|address| address.0);
        config.control = self.control;
        config.user = self.user;
        config.confine = self.confine.unwrap_or(true);
        config.choice = method_choice(self.path.as_deref(), self.plan.as_deref())?;
        config.congestion = self.congestion;
        config.socket_mode = self.socket_mode.map(|mode| mode.0);
        config.window_clamp = self.window_clamp == Some(true);
        Ok(config)
    }

    fn set_content(&self, content: &mut ContentRules) -> Result<(), Failure> {
        if !self.index.is_empty() {
            content.index.clone_from(&self.index);
        }
        content.listing = self.listing.unwrap_or(content.listing);
        content.hidden = self.hidden.unwrap_or(content.hidden);
        content.precompressed = self.precompressed.unwrap_or(content.precompressed);
        if let Some(is_replaced_by_rename) = self.replaced_by_rename {
            content.updates =
                if is_replaced_by_rename { FileUpdates::ByRename } else { FileUpdates::InPlace };
        }
        if let Some(is_replicated) = self.replicated {
            content.entity_tags =
                if is_replicated { EntityTags::OfCopies } else { EntityTags::OfFile };
        }
        content.fallback.clone_from(&self.fallback);
        content.symlinks = match self.symlinks {
            None | Some(LinkPolicy::Inside) => Symlinks::Inside,
            Some(LinkPolicy::Never) => Symlinks::Never,
            Some(LinkPolicy::Anywhere) => Symlinks::Anywhere,
        };
        for text in &self.error_page {
            let (status, file) = split_pair("error-page", text, '=', "404=/404.html")?;
            let status = status.parse().map_err(|_| {
                Failure::bad_input(format!(
                    "error-page {text:?}: {status:?} is not a status code, such as 404"
                ))
            })?;
            content.error_pages.push((status, file));
        }
        Ok(())
    }

    fn extra_fields(&self) -> Result<ExtraFields, Failure> {
        let mut fields = ExtraFields::default();
        for text in &self.header {
            fields.headers.push(split_pair("header", text, ':', "X-Frame-Options: DENY")?);
        }
        for text in &self.cache_control {
            let pair = split_pair("cache-control", text, '=', "*.html=no-cache")?;
            if pair.0.is_empty() || pair.1.is_empty() {
                return Err(Failure::bad_input(format!(
                    "cache-control {text:?} lacks a pattern or a value: write \
                     \"*.html=no-cache\", for example"
                )));
            }
            fields.cache_control.push(pair);
        }
        if let Some(invalid) = self.cors.iter().find(|origin| !is_origin(origin)) {
            return Err(Failure::bad_input(format!(
                "cors {invalid:?} is not an origin as browsers send it: write \
                 \"https://example.com\", with the port if it is not the default port and \
                 without a path, or \"*\""
            )));
        }
        fields.cors.clone_from(&self.cors);
        Ok(fields)
    }

    fn set_limits(&self, limits: &mut Limits) -> Result<(), Failure> {
        fn set<T: Copy>(limit: &mut T, option: Option<T>) {
            *limit = option.unwrap_or(*limit);
        }
        let time = |option: Option<Timeout>| option.map(|time| time.0);
        set(&mut limits.connections_max, self.max_connections.map(Count::get));
        limits.connections_per_address_max = self.max_connections_per_address.map(|count| count.0);
        set(&mut limits.head_bytes_max, head_limit(self.head_limit)?);
        set(&mut limits.head_timeout, time(self.head_timeout));
        set(&mut limits.idle_timeout, time(self.idle_timeout));
        set(&mut limits.send_timeout, time(self.send_timeout));
        set(&mut limits.drain_timeout, time(self.drain_timeout));
        limits.rate_bytes_per_second = self.rate_limit.map(|size| size.0);
        set(&mut limits.cached_files_max, self.cached_files);
        set(&mut limits.cached_bytes_max, self.cache_memory.map(|size| size.0 as usize));
        Ok(())
    }
}

/// Rejects options that do not have an effect without another option.
fn check_dependencies(options: &Options) -> Result<(), Failure> {
    let pairs = [
        (options.log_format.is_some() && options.access_log.is_none(), "log-format", "access-log"),
        (options.auth_realm.is_some() && options.auth_file.is_none(), "auth-realm", "auth-file"),
        (options.put_limit.is_some() && options.allow_put != Some(true), "put-limit", "allow-put"),
    ];
    match pairs.iter().find(|(is_missing, ..)| *is_missing) {
        Some((_, name, other)) => {
            Err(Failure::bad_input(format!("{name} has no effect without {other}")))
        }
        None => Ok(()),
    }
}

fn head_limit(size: Option<Size>) -> Result<Option<usize>, Failure> {
    let Some(Size(bytes)) = size else { return Ok(None) };
    if (256..=1 << 20).contains(&bytes) {
        Ok(Some(bytes as usize))
    } else {
        Err(Failure::bad_input(format!("head-limit {bytes} B is out of range: 256B to 1MiB")))
    }
}

/// Whether the text is `*` or an origin as browsers serialize it (RFC 6454 section 6.2).
fn is_origin(text: &str) -> bool {
    let host = text.split_once("://").map_or("", |(_, host)| host);
    text == "*" || text == "null" || (!host.is_empty() && !host.contains(['/', '?', '#', '@', ' ']))
}

fn split_pair(
    name: &str,
    text: &str,
    separator: char,
    example: &str,
) -> Result<(String, String), Failure> {
    text.split_once(separator)
        .map(|(before, after)| (before.trim().to_owned(), after.trim().to_owned()))
        .ok_or_else(|| {
            Failure::bad_input(format!("{name} {text:?} has no {separator:?}: write {example:?}"))
        })
}

fn method_choice(
    path: Option<&str>,
    plan: Option<&std::path::Path>,
) -> Result<MethodChoice, Failure> {
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
