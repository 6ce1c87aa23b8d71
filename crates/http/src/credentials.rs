//! Parses the `Authorization` field of the Basic scheme (RFC 7617).

use base64::Engine;
use base64::engine::general_purpose::STANDARD_PAD_INDIFFERENT;
use std::fmt;

/// A user name and a password as received, not yet verified.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// The user name.
    pub user: String,
    /// The password.
    pub password: Vec<u8>,
}

impl Credentials {
    /// Parses the field's value; `None` if it has another scheme or is malformed.
    pub fn parse(field: &[u8]) -> Option<Self> {
        let (scheme, encoded) = field.split_at(field.iter().position(|&byte| byte == b' ')?);
        if !scheme.eq_ignore_ascii_case(b"basic") {
            return None;
        }
        let decoded = STANDARD_PAD_INDIFFERENT.decode(encoded.trim_ascii()).ok()?;
        let colon = decoded.iter().position(|&byte| byte == b':')?;
        let user = std::str::from_utf8(&decoded[..colon]).ok()?.to_owned();
        let password = decoded[colon + 1..].to_vec();
        // RFC 7617 section 2: no control characters in either.
        let is_control = |byte: &u8| byte.is_ascii_control();
        (!user.as_bytes().iter().chain(&password).any(is_control))
            .then_some(Self { user, password })
    }
}

impl fmt::Debug for Credentials {
    /// Formats the credentials without the password: the output may end up in a log.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Credentials").field("user", &self.user).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(field: &str) -> Option<(String, String)> {
        let Credentials { user, password } = Credentials::parse(field.as_bytes())?;
        Some((user, String::from_utf8(password).unwrap()))
    }

    #[test]
    fn credentials_are_parsed_as_rfc_7617_defines_them() {
        let some = |user: &str, password: &str| Some((user.to_owned(), password.to_owned()));
        assert_eq!(parsed("Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ=="), some("Aladdin", "open sesame"));
        assert_eq!(parsed("basic  dGVzdDoxMjPCow"), some("test", "123£"), "without padding");
        assert_eq!(parsed("Basic YTpiOmM="), some("a", "b:c"), "the first colon separates");
        assert_eq!(parsed("Basic Og=="), some("", ""));
        for field in
            ["", "Basic", "Basic ", "Bearer YTpi", "Basic YQ==", "Basic ****", "Basic YTpiCg=="]
        {
            assert_eq!(parsed(field), None, "{field}");
        }
        assert!(!format!("{:?}", Credentials::parse(b"Basic YTpzZWNyZXQ=")).contains("secret"));
    }
}
