//! The server's side of TLS on the loopback.
#![allow(unreachable_pub)] // of several test binaries

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tls").join(name)
}

/// A self-signed certificate for 127.0.0.1, valid until 2126, that is no authority: `openssl req -x509 -addext
/// basicConstraints=CA:FALSE`.
pub fn certificate() -> PathBuf {
    file("cert.pem")
}

/// That of a server with this certificate.
pub fn config() -> Arc<ServerConfig> {
    let chain = CertificateDer::from_pem_file(certificate()).unwrap();
    let key = PrivateKeyDer::from_pem_file(file("key.pem")).unwrap();
    let builder = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap();
    Arc::new(builder.with_no_client_auth().with_single_cert(vec![chain], key).unwrap())
}
