//! Single requests to the API server, over a connection that is kept.

use std::time::Duration;

use http::Request;
use tokio::sync::Mutex as Shared;

use super::{
    Failure, Target,
    connect::{Connection, Connector},
    fetch::{next, send},
};

/// Sends single requests.
pub struct Caller {
    connector: Connector,
    connection: Shared<Option<Connection>>,
    /// Time limit for the beginning of an answer, and for the next piece of it.
    patience: Duration,
    /// Maximum length of an answer, in bytes.
    answer_max: usize,
}

impl Caller {
    /// Returns a caller of this API server. Sends no request yet.
    pub fn new(target: Target, patience: Duration, answer_max: usize) -> Self {
        Self {
            connector: Connector::new(target),
            connection: Shared::default(),
            patience,
            answer_max,
        }
    }

    /// Returns the server's name for people.
    pub fn server_text(&self) -> String {
        self.connector.target.server_text()
    }

    /// Sends a request, and returns the answer.
    pub async fn call(&self, request: http::Result<Request<Vec<u8>>>) -> Result<Vec<u8>, Failure> {
        let request = request.map_err(|error| Failure::Unreachable(error.to_string()))?;
        let connection = {
            let mut kept = self.connection.lock().await;
            match &*kept {
                Some(connection) => connection.clone(),
                None => kept.insert(self.connector.connect().await?).clone(),
            }
        };
        let answer = self.answer(&connection, request).await;
        if answer.as_ref().is_err_and(Failure::is_of_connection) {
            // Tokens, certificates and addresses in files may have changed.
            *self.connection.lock().await = None;
        }
        answer
    }

    async fn answer(
        &self,
        connection: &Connection,
        request: Request<Vec<u8>>,
    ) -> Result<Vec<u8>, Failure> {
        let token = connection.token.as_deref();
        let mut body = send(&connection.client, token, self.patience, request).await?;
        let mut text = Vec::new();
        while let Some(piece) = next(&mut body, self.patience).await? {
            text.extend_from_slice(&piece);
            if text.len() > self.answer_max {
                return Err(Failure::Broken("the answer does not end".to_owned()));
            }
        }
        Ok(text)
    }
}
