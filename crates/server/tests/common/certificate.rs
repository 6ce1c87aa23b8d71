//! Certificates for tests.

use std::path::Path;
use std::process::Command;

/// Makes `certificate.pem` and `key.pem` for `localhost`; false, with a message, without openssl.
pub fn make_certificate(folder: &Path) -> bool {
    // A configuration of its own: a machine need not have OpenSSL's default one.
    let config = "[req]\ndistinguished_name = name\n[name]\n";
    std::fs::write(folder.join("openssl.cnf"), config).unwrap();
    let arguments = "req -x509 -config openssl.cnf -newkey ec -nodes -days 2 \
                     -pkeyopt ec_paramgen_curve:P-256 -subj /CN=localhost \
                     -addext subjectAltName=DNS:localhost \
                     -addext basicConstraints=critical,CA:FALSE -keyout key.pem \
                     -out certificate.pem";
    let mut openssl = Command::new("openssl");
    match openssl.args(arguments.split_whitespace()).current_dir(folder).output() {
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            true
        }
        Err(error) => {
            eprintln!("SKIPPED: TLS is not tested without openssl (ci/install): {error}");
            false
        }
    }
}
