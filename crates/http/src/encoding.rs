//! Content codings: chooses between precompressed files by `Accept-Encoding` (RFC 9110 section
//! 12.5.3).

use crate::list_field::ListField;

/// A content coding of precompressed files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coding {
    /// Brotli (RFC 7932).
    Brotli,
    /// Zstandard (RFC 8878).
    Zstandard,
    /// gzip (RFC 1952).
    Gzip,
}

impl Coding {
    /// All codings, the one with the smallest output first. Of codings with equal weights the first
    /// that is available is sent.
    pub const ALL: [Self; 3] = [Self::Brotli, Self::Zstandard, Self::Gzip];

    /// The coding's name in `Content-Encoding`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Brotli => "br",
            Self::Zstandard => "zstd",
            Self::Gzip => "gzip",
        }
    }

    /// The extension that a precompressed file adds to the name of the original.
    pub fn extension(self) -> &'static str {
        match self {
            Self::Brotli => ".br",
            Self::Zstandard => ".zst",
            Self::Gzip => ".gz",
        }
    }
}

/// Chooses the available coding with the largest weight; `None` to send the file without a coding.
pub fn choose(field: &ListField<'_>, available: impl Iterator<Item = Coding>) -> Option<Coding> {
    let mut best: Option<(Coding, u16)> = None;
    let identity_weight = weight(field, b"identity").unwrap_or(1);
    for coding in available {
        let coding_weight =
            weight(field, coding.name().as_bytes()).or_else(|| weight(field, b"*")).unwrap_or(0);
        if coding_weight > 0
            && coding_weight >= identity_weight
            && best.is_none_or(|(_, largest)| coding_weight > largest)
        {
            best = Some((coding, coding_weight));
        }
    }
    best.map(|(coding, _)| coding)
}

/// The weight of a coding in thousandths; `None` if the field does not name the coding.
fn weight(field: &ListField<'_>, name: &[u8]) -> Option<u16> {
    let items = field.lines().flat_map(|line| line.split(|&byte| byte == b','));
    items.map(|item| item.split(|&byte| byte == b';')).find_map(|mut parts| {
        let coding = parts.next()?.trim_ascii();
        // `x-gzip` is an old name of gzip (RFC 9110 section 8.4.1.3).
        let is_named = coding.eq_ignore_ascii_case(name)
            || (name == b"gzip" && coding.eq_ignore_ascii_case(b"x-gzip"));
        is_named.then(|| parts.find_map(|part| parse_weight(part.trim_ascii())).unwrap_or(1000))
    })
}

/// Parses a weight: `q=0.5` is 500. `None` if it is malformed.
pub(crate) fn parse_weight(parameter: &[u8]) -> Option<u16> {
    let value = parameter.strip_prefix(b"q=").or_else(|| parameter.strip_prefix(b"Q="))?;
    let value: f32 = std::str::from_utf8(value).ok()?.parse().ok()?;
    (0.0..=1.0).contains(&value).then_some((value * 1000.0) as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_available_coding_with_the_largest_weight_is_chosen() {
        let chosen = |field: &'static [u8]| choose(&ListField::of(field), Coding::ALL.into_iter());
        assert_eq!(chosen(b"gzip, deflate, br, zstd"), Some(Coding::Brotli));
        assert_eq!(chosen(b"gzip, zstd;q=0.9"), Some(Coding::Gzip));
        assert_eq!(chosen(b"gzip;q=0, *"), Some(Coding::Brotli));
        assert_eq!(chosen(b"br;q=0, zstd;q=0, *;q=0.1"), Some(Coding::Gzip));
        assert_eq!(chosen(b"x-gzip"), Some(Coding::Gzip));
        assert_eq!(chosen(b"identity, gzip;q=0.5"), None, "identity has the larger weight");
        assert_eq!(chosen(b"identity;q=0.2, gzip;q=0.5"), Some(Coding::Gzip));
        assert_eq!(chosen(b"deflate"), None);
        assert_eq!(chosen(b""), None);
        assert_eq!(chosen(b"gzip;q=nonsense"), Some(Coding::Gzip));
        assert_eq!(
            choose(&ListField::default(), Coding::ALL.into_iter()),
            None,
            "no field, no coding"
        );
        assert_eq!(
            choose(&ListField::of(b"br, gzip"), [Coding::Gzip].into_iter()),
            Some(Coding::Gzip)
        );
    }
}
