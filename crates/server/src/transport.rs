//! How bytes reached the socket, for metrics.

use haul::SendMethod;
use std::borrow::Cow;

/// How bytes reached the socket: copied from memory, by a send method, or through encryption.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Transport {
    /// From this program's memory.
    Memory,
    /// Encrypted by this program.
    Tls,
    /// From this program's memory, encrypted by the kernel.
    KernelTls,
    /// A file, by this send method.
    Method(SendMethod),
    /// A file, by this send method, encrypted by the kernel.
    KernelTlsMethod(SendMethod),
}

impl Transport {
    /// The number of transports.
    pub const COUNT: usize = 3 + 2 * SendMethod::ALL.len();

    /// All transports, in the order of [`Transport::index`].
    pub fn all() -> impl Iterator<Item = Self> {
        let methods = || SendMethod::ALL.iter().copied();
        let others = [Self::Memory, Self::Tls, Self::KernelTls].into_iter();
        others.chain(methods().map(Self::Method)).chain(methods().map(Self::KernelTlsMethod))
    }

    /// The name in metrics.
    pub fn name(self) -> Cow<'static, str> {
        match self {
            Self::Memory => "memory".into(),
            Self::Tls => "tls".into(),
            Self::KernelTls => "ktls".into(),
            Self::Method(method) => method.name().into(),
            Self::KernelTlsMethod(method) => format!("ktls+{method}").into(),
        }
    }

    /// A number below [`Transport::COUNT`], for tables.
    pub fn index(self) -> usize {
        let of = |method| SendMethod::ALL.iter().position(|&other| other == method).unwrap_or(0);
        match self {
            Self::Memory => 0,
            Self::Tls => 1,
            Self::KernelTls => 2,
            Self::Method(method) => 3 + of(method),
            Self::KernelTlsMethod(method) => 3 + SendMethod::ALL.len() + of(method),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_transport_has_its_own_index() {
        let indices: Vec<usize> = Transport::all().map(Transport::index).collect();
        assert_eq!(indices, (0..Transport::COUNT).collect::<Vec<_>>());
    }
}
