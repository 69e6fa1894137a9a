//! Reasons why the agent cannot connect to the API server.

use std::{error::Error, path::PathBuf};

use kube::config::KubeconfigError;

/// The reason why the agent cannot connect to the API server: files or variables are wrong.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// No setting has the server's address.
    #[error(
        "nothing says where the API server is: give --kubeconfig FILE (or KUBECONFIG), or in a pod \
         --api-server URL (or KUBERNETES_SERVICE_HOST)"
    )]
    Nowhere,
    /// The kubeconfig cannot be used.
    #[error("{}: {error}", path.display())]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// The reason.
        #[source]
        error: Box<KubeconfigError>,
    },
    /// The service account cannot be used.
    #[error("the service account in {}: {text}", path.display())]
    ServiceAccount {
        /// Its directory.
        path: PathBuf,
        /// The reason.
        text: String,
    },
    /// The URL is invalid.
    #[error("`{url}` is not a URL of an API server; expected one like https://192.0.2.1:6443")]
    Url {
        /// The configured URL.
        url: String,
    },
    /// The file has no token.
    #[error("the token in {}: {text}", path.display())]
    Token {
        /// The file.
        path: PathBuf,
        /// The reason.
        text: String,
    },
    /// Keys, certificates or a proxy cannot be used.
    #[error("cannot make a connection: {0}")]
    Client(String),
}

/// Returns the text of an error with its causes, without causes that an error's own text repeats.
pub(super) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let words = error.to_string();
        if !text.contains(&words) {
            text = format!("{text}: {words}");
        }
        cause = error.source();
    }
    text
}
