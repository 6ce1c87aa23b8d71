//! What a program offers by itself: the setting with which it sends files by `sendfile`, or
//! forwards by `splice`.

/// The settings of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZeroCopySettings {
    /// How to make the program send files by `sendfile`; `None` if it cannot.
    pub sendfile: Option<&'static str>,
    /// How to make the program forward connections by `splice`; `None` if it cannot.
    pub splice: Option<&'static str>,
}

const NONE: ZeroCopySettings = ZeroCopySettings { sendfile: None, splice: None };

/// Programs by their names in `/proc/PID/comm`. Sources: the documentation of each program.
const PROGRAMS: [(&[&str], ZeroCopySettings); 12] = [
    // https://httpd.apache.org/docs/2.4/mod/core.html#enablesendfile
    (
        &["apache2", "httpd"],
        ZeroCopySettings {
            sendfile: Some("EnableSendfile On (not for files on network file systems)"),
            ..NONE
        },
    ),
    // https://nginx.org/en/docs/http/ngx_http_core_module.html#sendfile
    (&["nginx"], ZeroCopySettings { sendfile: Some("sendfile on;"), ..NONE }),
    // sendfile is lighttpd's default on Linux.
    (
        &["lighttpd"],
        ZeroCopySettings { sendfile: Some("server.network-backend = \"sendfile\""), ..NONE },
    ),
    // vsftpd.conf(5)
    (&["vsftpd"], ZeroCopySettings { sendfile: Some("use_sendfile=YES"), ..NONE }),
    // http://www.proftpd.org/docs/modules/mod_xfer.html#UseSendfile
    (&["proftpd"], ZeroCopySettings { sendfile: Some("UseSendfile on"), ..NONE }),
    // smb.conf(5). Asynchronous reads (the default) do not use sendfile.
    (
        &["smbd"],
        ZeroCopySettings { sendfile: Some("use sendfile = yes with aio read size = 0"), ..NONE },
    ),
    // https://docs.gunicorn.org/en/stable/settings.html#sendfile
    (
        &["gunicorn"],
        ZeroCopySettings {
            sendfile: Some("remove --no-sendfile, and return files by wsgi.file_wrapper"),
            ..NONE
        },
    ),
    // https://uwsgi-docs.readthedocs.io/en/latest/Options.html
    (&["uwsgi", "uwsgi-core"], ZeroCopySettings { sendfile: Some("--offload-threads 1"), ..NONE }),
    (
        &["python3", "python"],
        ZeroCopySettings {
            sendfile: Some("socket.sendfile(file), or loop.sendfile in asyncio"),
            ..NONE
        },
    ),
    (
        &["java"],
        ZeroCopySettings {
            sendfile: Some("FileChannel.transferTo(0, length, socketChannel)"),
            ..NONE
        },
    ),
    // https://docs.haproxy.org/2.6/configuration.html#option%20splice-auto
    (&["haproxy"], ZeroCopySettings { splice: Some("option splice-auto"), ..NONE }),
    (&["node"], NONE),
];

/// The settings of the program with this name; `None` if the program is not known.
pub fn of(name: &str) -> Option<ZeroCopySettings> {
    let known = PROGRAMS.iter().find(|(names, _)| names.contains(&name));
    // A program of Debian with its version in the name, such as `python3.11`.
    let known = known.or_else(|| {
        PROGRAMS.iter().find(|(names, _)| {
            names.iter().any(|known| {
                name.strip_prefix(known)
                    .is_some_and(|rest| rest.starts_with(|c: char| c == '.' || c.is_ascii_digit()))
            })
        })
    });
    known.map(|&(_, settings)| settings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_in_the_name_does_not_hide_the_program() {
        assert_eq!(of("python3.11"), of("python3"));
        assert!(of("python3").unwrap().sendfile.is_some());
        assert_eq!(of("nginx-proxy"), None);
        assert_eq!(of(""), None);
    }
}
