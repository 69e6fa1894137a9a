//! Why there is no way to the API server.

use std::{error::Error, path::PathBuf};

use kube::config::KubeconfigError;

/// Why there is no way to the API server: something in files or variables.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Nothing says where it is.
    #[error(
        "nothing says where the API server is: give --kubeconfig FILE (or KUBECONFIG), or in a pod \
         --api-server URL (or KUBERNETES_SERVICE_HOST)"
    )]
    Nowhere,
    /// The kubeconfig is of no use.
    #[error("{}: {error}", path.display())]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        error: Box<KubeconfigError>,
    },
    /// The service account is of no use.
    #[error("the service account in {}: {text}", path.display())]
    ServiceAccount {
        /// Its directory.
        path: PathBuf,
        /// What is wrong with it.
        text: String,
    },
    /// The URL is none.
    #[error("`{url}` is not a URL of an API server; expected one like https://192.0.2.1:6443")]
    Url {
        /// As given.
        url: String,
    },
    /// There is no token in the file that has it.
    #[error("the token in {}: {text}", path.display())]
    Token {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        text: String,
    },
    /// Keys, certificates or a proxy are of no use.
    #[error("cannot make a connection: {0}")]
    Client(String),
}

/// An error and its causes, those left out that an error's own words already tell.
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
