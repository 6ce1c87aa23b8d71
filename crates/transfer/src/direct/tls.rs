//! TLS 1.3 for direct streams, with a key that the listening end made for this session.
//!
//! The listening end has a raw public key (RFC 7250), which the connecting end knows from ssh.
//! After the handshake the kernel encrypts if it can, and otherwise this program does.

use super::timed_socket::{Duplex, TimedSocket};
use super::tls_error;
use haul_server::ktls::{self, KtlsSupport};
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{
    AlwaysResolvesClientRawPublicKeys, UnbufferedClientConnection, WantsClientCert,
};
use rustls::crypto::ring::cipher_suite::{
    TLS13_AES_128_GCM_SHA256, TLS13_CHACHA20_POLY1305_SHA256,
};
use rustls::crypto::{CryptoProvider, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{
    CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime,
};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{
    AlwaysResolvesServerRawPublicKeys, UnbufferedServerConnection, WantsServerCert,
};
use rustls::sign::CertifiedKey;
use rustls::unbuffered::{ConnectionState, UnbufferedStatus};
use rustls::{
    ClientConfig, CommonState, ConfigBuilder, DigitallySignedStruct, DistinguishedName,
    ExtractedSecrets, ServerConfig, SignatureScheme, WantsVerifier,
};
use std::collections::HashSet;
use std::io::{self, IoSlice, Read, Write};
use std::ops::Range;
use std::sync::Arc;

/// The bytes that are read from a socket at a time: many records.
const READ_BYTES: usize = 256 << 10;
/// The largest ciphertext of a record, with its header (RFC 8446 section 5.2).
const RECORD_BYTES_MAX: usize = 5 + (1 << 14) + 256;
/// What a record has besides its plaintext: the header, the type and the tag.
const RECORD_OVERHEAD: usize = 5 + 1 + 16;
/// The plaintext of a full record.
const PLAIN_BYTES: usize = 1 << 14;
/// Room for other messages, such as an update of the keys.
const MESSAGE_ROOM: usize = 4096;

/// TLS for the end that listens.
#[derive(Debug, Clone)]
pub struct ServerTls {
    config: Arc<ServerConfig>,
    public_key: Vec<u8>,
    /// The ciphers that the kernel encrypts.
    pub ktls: KtlsSupport,
}

/// TLS for the end that connects.
#[derive(Debug, Clone)]
pub struct ClientTls {
    config: Arc<ClientConfig>,
    /// The ciphers that the kernel encrypts.
    pub ktls: KtlsSupport,
}

/// A private key, and its public key in the place of a certificate.
#[derive(Debug, Clone)]
pub struct Key {
    certified: Arc<CertifiedKey>,
    /// The public key (a `SubjectPublicKeyInfo`).
    pub public: Vec<u8>,
}

impl Key {
    /// A new key.
    pub fn new() -> io::Result<Self> {
        let pair =
            EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &SystemRandom::new());
        let pair = pair.map_err(|_| io::Error::other("no random numbers for a key"))?;
        let key = PrivatePkcs8KeyDer::from(pair.as_ref().to_vec());
        let key = provider().key_provider.load_private_key(key.into()).map_err(tls_error)?;
        let public = key.public_key().ok_or(io::ErrorKind::Unsupported)?.as_ref().to_vec();
        let certified = CertifiedKey::new(vec![CertificateDer::from(public.clone())], key);
        Ok(Self { certified: Arc::new(certified), public })
    }
}

impl ServerTls {
    /// A new key, for clients without keys.
    pub fn new() -> io::Result<Self> {
        Self::build(&Key::new()?, ConfigBuilder::<ServerConfig, _>::with_no_client_auth)
    }

    /// TLS with this key, for clients with these public keys.
    pub fn with_clients(key: &Key, public_keys: &[Vec<u8>]) -> io::Result<Self> {
        let verifier = KeyVerifier {
            public_keys: public_keys.iter().cloned().collect(),
            provider: provider(),
        };
        Self::build(key, |builder| builder.with_client_cert_verifier(Arc::new(verifier)))
    }

    fn build(
        key: &Key,
        clients: impl FnOnce(
            ConfigBuilder<ServerConfig, WantsVerifier>,
        ) -> ConfigBuilder<ServerConfig, WantsServerCert>,
    ) -> io::Result<Self> {
        let builder = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(tls_error)?;
        let resolver = AlwaysResolvesServerRawPublicKeys::new(Arc::clone(&key.certified));
        let mut config = clients(builder).with_cert_resolver(Arc::new(resolver));
        // A ticket would be the first record after the handshake, which the kernel cannot take.
        config.send_tls13_tickets = 0;
        config.enable_secret_extraction = true;
        let public_key = key.public.clone();
        Ok(Self { config: Arc::new(config), public_key, ktls: kernel_support() })
    }

    /// The public key (a `SubjectPublicKeyInfo`).
    pub fn public_key(&self) -> Vec<u8> {
        self.public_key.clone()
    }

    /// Makes the handshake.
    pub fn accept(&self, socket: TimedSocket) -> io::Result<TlsStream<UnbufferedServerConnection>> {
        let connection = UnbufferedServerConnection::new(Arc::clone(&self.config));
        TlsStream::handshake(socket, connection.map_err(tls_error)?)
    }
}

impl ClientTls {
    /// TLS with the end that has this public key.
    pub fn new(public_key: &[u8]) -> io::Result<Self> {
        Self::build(public_key, ConfigBuilder::<ClientConfig, _>::with_no_client_auth)
    }

    /// TLS with the end that has this public key, which asks for the key of this end.
    pub fn with_key(public_key: &[u8], key: &Key) -> io::Result<Self> {
        let resolver = AlwaysResolvesClientRawPublicKeys::new(Arc::clone(&key.certified));
        Self::build(public_key, |builder| builder.with_client_cert_resolver(Arc::new(resolver)))
    }

    fn build(
        public_key: &[u8],
        own_key: impl FnOnce(ConfigBuilder<ClientConfig, WantsClientCert>) -> ClientConfig,
    ) -> io::Result<Self> {
        let public_keys = std::iter::once(public_key.to_vec()).collect();
        let verifier = KeyVerifier { public_keys, provider: provider() };
        let builder = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(tls_error)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier));
        let mut config = own_key(builder);
        config.enable_sni = false;
        config.resumption = rustls::client::Resumption::disabled();
        config.enable_secret_extraction = true;
        Ok(Self { config: Arc::new(config), ktls: kernel_support() })
    }

    /// Makes the handshake.
    pub fn connect(
        &self,
        socket: TimedSocket,
    ) -> io::Result<TlsStream<UnbufferedClientConnection>> {
        // The key counts, and no name.
        let name = ServerName::try_from("haul.invalid").map_err(tls_error)?;
        let connection = UnbufferedClientConnection::new(Arc::clone(&self.config), name);
        TlsStream::handshake(socket, connection.map_err(tls_error)?)
    }
}

/// The ciphers that the kernel encrypts; nothing if the kernel lacks TLS.
fn kernel_support() -> KtlsSupport {
    KtlsSupport::probe().unwrap_or_default()
}

/// The ciphers, the cheaper cipher of this CPU first.
fn provider() -> Arc<CryptoProvider> {
    #[cfg(target_arch = "x86_64")]
    let has_aes = std::arch::is_x86_feature_detected!("aes");
    #[cfg(target_arch = "aarch64")]
    let has_aes = std::arch::is_aarch64_feature_detected!("aes");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let has_aes = false;
    let mut cipher_suites = vec![TLS13_AES_128_GCM_SHA256, TLS13_CHACHA20_POLY1305_SHA256];
    if !has_aes {
        cipher_suites.reverse();
    }
    let provider = rustls::crypto::ring::default_provider();
    Arc::new(CryptoProvider { cipher_suites, ..provider })
}

/// Accepts these public keys.
#[derive(Debug)]
struct KeyVerifier {
    public_keys: HashSet<Vec<u8>>,
    provider: Arc<CryptoProvider>,
}

impl KeyVerifier {
    fn check(&self, key: &CertificateDer<'_>) -> Result<(), rustls::Error> {
        if self.public_keys.contains(key.as_ref()) {
            Ok(())
        } else {
            Err(rustls::CertificateError::ApplicationVerificationFailure.into())
        }
    }

    fn verify(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        let key = SubjectPublicKeyInfoDer::from(key.as_ref());
        verify_tls13_signature_with_raw_key(message, &key, signature, algorithms)
    }
}

impl ClientCertVerifier for KeyVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        self.check(end_entity).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::PeerIncompatible::ServerDoesNotSupportTls12Or13.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.verify(message, cert, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

impl ServerCertVerifier for KeyVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.check(end_entity).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::PeerIncompatible::ServerDoesNotSupportTls12Or13.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.verify(message, cert, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

/// An end of a connection in rustls.
pub trait TlsConnection: Send + 'static {
    type Data;

    fn process<'c, 'i>(
        &'c mut self,
        incoming: &'i mut [u8],
    ) -> UnbufferedStatus<'c, 'i, Self::Data>;

    fn common(&self) -> &CommonState;

    fn into_secrets(self) -> Result<ExtractedSecrets, rustls::Error>;
}

impl TlsConnection for UnbufferedClientConnection {
    type Data = rustls::client::ClientConnectionData;

    fn process<'c, 'i>(
        &'c mut self,
        incoming: &'i mut [u8],
    ) -> UnbufferedStatus<'c, 'i, Self::Data> {
        self.process_tls_records(incoming)
    }

    fn common(&self) -> &CommonState {
        self
    }

    fn into_secrets(self) -> Result<ExtractedSecrets, rustls::Error> {
        self.dangerous_into_kernel_connection().map(|(secrets, _)| secrets)
    }
}

impl TlsConnection for UnbufferedServerConnection {
    type Data = rustls::server::ServerConnectionData;

    fn process<'c, 'i>(
        &'c mut self,
        incoming: &'i mut [u8],
    ) -> UnbufferedStatus<'c, 'i, Self::Data> {
        self.process_tls_records(incoming)
    }

    fn common(&self) -> &CommonState {
        self
    }

    fn into_secrets(self) -> Result<ExtractedSecrets, rustls::Error> {
        self.dangerous_into_kernel_connection().map(|(secrets, _)| secrets)
    }
}

/// Lets the kernel encrypt if it can. Returns the stream and whether the kernel encrypts.
pub fn into_duplex<C: TlsConnection>(
    stream: TlsStream<C>,
    support: KtlsSupport,
) -> io::Result<(Box<dyn Duplex>, bool)> {
    // Neither end sends anything before the other end finished its handshake, so the socket holds
    // no record that the kernel would miss.
    let is_possible = support.covers(stream.connection.common())
        && stream.incoming.is_empty()
        && ktls::prepare(stream.socket.socket()).is_ok();
    if !is_possible {
        return Ok((Box::new(stream), false));
    }
    let secrets = stream.connection.into_secrets().map_err(tls_error)?;
    ktls::install_secrets(stream.socket.socket(), &secrets)?;
    Ok((Box::new(stream.socket), true))
}

/// A stream that this program encrypts.
pub struct TlsStream<C> {
    socket: TimedSocket,
    connection: C,
    /// Ciphertext that was received and not decrypted.
    incoming: Ciphertext,
    /// Ciphertext for the socket.
    outgoing: Ciphertext,
    /// Plaintext that did not fit into the buffer of a read.
    plain: Vec<u8>,
    plain_read: usize,
}

/// Ciphertext in a buffer that stays allocated.
#[derive(Default)]
struct Ciphertext {
    buffer: Vec<u8>,
    held: Range<usize>,
}

impl Ciphertext {
    fn bytes(&mut self) -> &mut [u8] {
        &mut self.buffer[self.held.clone()]
    }

    fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Removes bytes at the beginning.
    fn discard(&mut self, count: usize) {
        self.held.start += count;
    }

    fn clear(&mut self) {
        self.held = 0..0;
    }

    /// Room for so many more bytes.
    fn room(&mut self, count: usize) -> &mut [u8] {
        if self.held.is_empty() {
            self.clear();
        } else if self.held.start > 0 {
            self.buffer.copy_within(self.held.clone(), 0);
            self.held = 0..self.held.len();
        }
        let end = self.held.end;
        if self.buffer.len() < end + count {
            self.buffer.resize(end + count, 0);
        }
        &mut self.buffer[end..end + count]
    }

    /// Adds bytes that were written to the room.
    fn add(&mut self, count: usize) {
        self.held.end += count;
    }
}

impl<C: TlsConnection> TlsStream<C> {
    fn handshake(socket: TimedSocket, connection: C) -> io::Result<Self> {
        let (incoming, outgoing) = (Ciphertext::default(), Ciphertext::default());
        let plain = Vec::new();
        let mut stream = Self { socket, connection, incoming, outgoing, plain, plain_read: 0 };
        while let Progress::NeedsBytes = stream.process(&mut [])? {
            if !stream.connection.common().is_handshaking() {
                return Ok(stream);
            }
            stream.receive(RECORD_BYTES_MAX)?;
        }
        Err(io::ErrorKind::UnexpectedEof.into())
    }

    /// The public key of the other end, if it has a key.
    pub fn peer_key(&self) -> Option<Vec<u8>> {
        let keys = self.connection.common().peer_certificates()?;
        keys.first().map(|key| key.as_ref().to_vec())
    }

    /// Receives ciphertext.
    fn receive(&mut self, bytes_max: usize) -> io::Result<()> {
        match self.socket.read(self.incoming.room(bytes_max)) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                self.incoming.add(count);
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Sends ciphertext.
    fn send(&mut self) -> io::Result<()> {
        let sent = self.socket.write_all(self.outgoing.bytes());
        self.outgoing.clear();
        sent
    }

    /// Decrypts what was received, into the buffer and then into `plain`. Sends what the protocol
    /// has to answer.
    fn process(&mut self, buffer: &mut [u8]) -> io::Result<Progress> {
        let mut filled = 0;
        loop {
            let UnbufferedStatus { discard, state } =
                self.connection.process(self.incoming.bytes());
            let mut discarded = discard;
            // The peer learns of a failure by the end of the connection.
            let state = state.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
            let progress = match state {
                ConnectionState::ReadTraffic(mut traffic) => {
                    while let Some(record) = traffic.next_record() {
                        let record = record.map_err(tls_error)?;
                        discarded += record.discard;
                        let count = record.payload.len().min(buffer.len() - filled);
                        let (fits, rest) = record.payload.split_at(count);
                        buffer[filled..filled + count].copy_from_slice(fits);
                        self.plain.extend_from_slice(rest);
                        filled += count;
                    }
                    (filled == buffer.len()).then_some(Progress::Bytes(filled))
                }
                ConnectionState::EncodeTlsData(mut data) => {
                    encode(&mut self.outgoing, |room| data.encode(room).ok());
                    None
                }
                ConnectionState::TransmitTlsData(transmitted) => {
                    transmitted.done();
                    self.send()?;
                    None
                }
                ConnectionState::BlockedHandshake | ConnectionState::WriteTraffic(_) => {
                    Some(if filled > 0 { Progress::Bytes(filled) } else { Progress::NeedsBytes })
                }
                _ => Some(if filled > 0 { Progress::Bytes(filled) } else { Progress::Closed }),
            };
            self.incoming.discard(discarded);
            if let Some(progress) = progress {
                return Ok(progress);
            }
        }
    }

    /// Adds the ciphertext of bytes to what waits for the socket.
    fn encrypt(&mut self, bytes: &[u8]) -> io::Result<()> {
        loop {
            // What was received is part of the state of the connection.
            let UnbufferedStatus { discard, state } =
                self.connection.process(self.incoming.bytes());
            match state.map_err(tls_error)? {
                ConnectionState::WriteTraffic(mut traffic) if discard == 0 => {
                    let records = bytes.len() / PLAIN_BYTES + 1;
                    let room = bytes.len() + records * RECORD_OVERHEAD + MESSAGE_ROOM;
                    let count = traffic.encrypt(bytes, self.outgoing.room(room));
                    self.outgoing.add(count.map_err(tls_error)?);
                    return Ok(());
                }
                ConnectionState::EncodeTlsData(mut data) => {
                    encode(&mut self.outgoing, |room| data.encode(room).ok());
                }
                // What was encoded is sent before the bytes.
                ConnectionState::TransmitTlsData(transmitted) => transmitted.done(),
                ConnectionState::WriteTraffic(_) => {}
                // The peer sends content while this end does.
                _ => return Err(io::ErrorKind::InvalidData.into()),
            }
            self.incoming.discard(discard);
        }
    }
}

/// Adds a handshake message to ciphertext.
fn encode(outgoing: &mut Ciphertext, encode: impl FnOnce(&mut [u8]) -> Option<usize>) {
    let count = encode(outgoing.room(RECORD_BYTES_MAX));
    outgoing.add(count.unwrap_or(0));
}

/// What [`TlsStream::process`] found.
enum Progress {
    /// So many bytes of plaintext.
    Bytes(usize),
    /// More ciphertext is needed.
    NeedsBytes,
    /// The peer closed the stream.
    Closed,
}

impl<C: TlsConnection> Read for TlsStream<C> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        if self.plain_read < self.plain.len() {
            let count = buffer.len().min(self.plain.len() - self.plain_read);
            let end = self.plain_read + count;
            buffer[..count].copy_from_slice(&self.plain[self.plain_read..end]);
            self.plain_read = end;
            return Ok(count);
        }
        self.plain.clear();
        self.plain_read = 0;
        loop {
            match self.process(buffer)? {
                Progress::Bytes(count) => return Ok(count),
                Progress::Closed => return Ok(0),
                Progress::NeedsBytes => self.receive(READ_BYTES)?,
            }
        }
    }
}

impl<C: TlsConnection> Write for TlsStream<C> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        for part in parts.iter().filter(|part| !part.is_empty()) {
            self.encrypt(part)?;
        }
        self.send()?;
        Ok(parts.iter().map(|part| part.len()).sum())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<C: TlsConnection> Duplex for TlsStream<C> {
    fn end_handshake(&mut self) -> io::Result<()> {
        self.socket.end_handshake()
    }
}
