//! Fields whose value is a list, which a request may repeat.

/// A field whose value is a list. A client may split it into several lines (RFC 9110 section 5.3).
#[derive(Debug, Clone, Default)]
pub struct ListField<'b> {
    first: Option<&'b [u8]>,
    /// Hardly any request has more lines than one.
    others: Vec<&'b [u8]>,
}

impl<'b> ListField<'b> {
    /// A field with one line.
    #[cfg(test)]
    pub fn of(line: &'b [u8]) -> Self {
        Self { first: Some(line), others: Vec::new() }
    }

    /// Whether the request has the field.
    pub fn is_present(&self) -> bool {
        self.first.is_some()
    }

    /// Whether the value is `*`, which matches any representation.
    pub fn is_any(&self) -> bool {
        self.lines().any(|line| line.trim_ascii() == b"*")
    }

    /// The lines of the field.
    pub fn lines(&self) -> impl Iterator<Item = &'b [u8]> + '_ {
        self.first.iter().chain(&self.others).copied()
    }

    /// Adds a line.
    pub(crate) fn add(&mut self, line: &'b [u8]) {
        match self.first {
            None => self.first = Some(line),
            Some(_) => self.others.push(line),
        }
    }
}
