//! TLS: a certificate and its key, ready for handshakes.

use std::path::Path;
use std::sync::Arc;

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::{Error, Result};

/// Certificate and key, ready for handshakes.
#[derive(Clone)]
pub(in crate::server) struct Tls(pub(super) TlsAcceptor);

impl Tls {
    /// Errors: `Error::Invalid` naming the file that cannot be used.
    pub(in crate::server) fn load(chain: &Path, key: &Path) -> Result<Self> {
        let unusable = |path: &Path, e: &dyn std::fmt::Display| {
            Error::Invalid(format!("{} cannot be used for TLS: {e}", path.display()))
        };
        let certificates = CertificateDer::pem_file_iter(chain)
            .and_then(|all| all.collect::<std::result::Result<Vec<_>, _>>())
            .map_err(|e| unusable(chain, &e))?;
        let private = PrivateKeyDer::from_pem_file(key).map_err(|e| unusable(key, &e))?;
        let mut config =
            ServerConfig::builder_with_provider(Arc::new(tokio_rustls::rustls::crypto::ring::default_provider()))
                .with_safe_default_protocol_versions()
                .map_err(|e| unusable(chain, &e))?
                .with_no_client_auth()
                .with_single_cert(certificates, private)
                .map_err(|e| unusable(chain, &e))?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self(TlsAcceptor::from(Arc::new(config))))
    }
}
