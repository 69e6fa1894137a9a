//! Asks the agent on this node, over its Unix socket.

use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::{Serialize, de::DeserializeOwned};

use super::api::Page;

/// How long an agent may take to answer before it counts as hung.
const PATIENCE: Duration = Duration::from_secs(5);

/// Why the agent gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No process listens: no agent runs, or it has another socket.
    #[error("no agent listens on {}", socket.display())]
    NotRunning {
        /// The socket.
        socket: PathBuf,
    },
    /// This user may not use the socket.
    #[error("{}: permission denied; the agent's socket is for root only: use sudo", socket.display())]
    Denied {
        /// The socket.
        socket: PathBuf,
    },
    /// The agent did not answer as expected.
    #[error("the agent on {} does not answer {path}: {cause}", socket.display())]
    Answer {
        /// The socket.
        socket: PathBuf,
        /// The requested path.
        path: String,
        /// The failure.
        cause: String,
    },
}

/// A client of the agent. Each request is one connection: the agent may be restarted between two.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
}

impl Client {
    /// Creates a client, which does not connect yet.
    pub fn new(socket: &Path) -> Self {
        Self {
            socket: socket.to_owned(),
        }
    }

    /// Asks for `path` and reads the answer as JSON.
    ///
    /// # Errors
    ///
    /// If no process listens, or the answer is not as expected.
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, Error> {
        self.read(path, &self.get_text(path)?)
    }

    /// Makes the agent perform the action of `path`, and reads the answer as JSON.
    ///
    /// # Errors
    ///
    /// As for [`Client::get`].
    pub fn post<T: DeserializeOwned>(&self, path: &str) -> Result<T, Error> {
        self.read(path, &self.exchange("POST", path, "")?)
    }

    /// As [`Client::post`], with a JSON body.
    ///
    /// # Errors
    ///
    /// As for [`Client::get`].
    pub fn send<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T, Error> {
        let body = serde_json::to_string(body).map_err(|e| self.answer(path, e.to_string()))?;
        self.read(path, &self.exchange("POST", path, &body)?)
    }

    fn read<T: DeserializeOwned>(&self, path: &str, body: &str) -> Result<T, Error> {
        serde_json::from_str(body).map_err(|e| {
            self.answer(
                path,
                format!("{e} (is it the same version as this command?)"),
            )
        })
    }

    /// Asks for every page of a list.
    ///
    /// # Errors
    ///
    /// As for [`Client::get`].
    pub fn list<T: DeserializeOwned>(&self, path: &str) -> Result<Vec<T>, Error> {
        let mut page: Page<T> = self.get(path)?;
        let mut items = page.items;
        while let Some(after) = page.next {
            let and = if path.contains('?') { '&' } else { '?' };
            page = self.get(&format!("{path}{and}after={after}"))?;
            items.append(&mut page.items);
        }
        Ok(items)
    }

    /// Asks for `path` and reads the answer as text.
    ///
    /// # Errors
    ///
    /// If no process listens, or the agent does not answer in time or with a failure.
    pub fn get_text(&self, path: &str) -> Result<String, Error> {
        self.exchange("GET", path, "")
    }

    fn exchange(&self, method: &str, path: &str, body: &str) -> Result<String, Error> {
        let mut stream = UnixStream::connect(&self.socket).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => Error::NotRunning {
                socket: self.socket.clone(),
            },
            io::ErrorKind::PermissionDenied => Error::Denied {
                socket: self.socket.clone(),
            },
            _ => self.answer(path, e.to_string()),
        })?;
        let mut exchange = || {
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.set_write_timeout(Some(PATIENCE))?;
            // HTTP/1.0: the answer ends with the connection and is never in chunks.
            let of_body = if body.is_empty() {
                String::new()
            } else {
                format!(
                    "Content-Type: application/json\r\nContent-Length: {}\r\n",
                    body.len()
                )
            };
            let request = format!("{method} {path} HTTP/1.0\r\n{of_body}\r\n{body}");
            stream.write_all(request.as_bytes())?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            Ok(answer)
        };
        let answer = exchange().map_err(|e: io::Error| match e.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                self.answer(path, format!("no answer within {} s", PATIENCE.as_secs()))
            }
            _ => self.answer(path, e.to_string()),
        })?;
        let (head, body) = answer
            .split_once("\r\n\r\n")
            .ok_or_else(|| self.answer(path, "this is not HTTP".to_owned()))?;
        let status = head.split_ascii_whitespace().nth(1).unwrap_or_default();
        if status == "200" {
            Ok(body.to_owned())
        } else {
            Err(self.answer(path, format!("{status} {}", body.trim())))
        }
    }

    fn answer(&self, path: &str, cause: String) -> Error {
        Error::Answer {
            socket: self.socket.clone(),
            path: path.to_owned(),
            cause,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{os::unix::net::UnixListener, thread};

    use super::*;

    /// Serves as many connections as there are answers.
    fn server(answers: &'static [&'static str]) -> (tempfile::TempDir, Client) {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        thread::spawn(move || {
            for answer in answers {
                let (mut stream, _) = listener.accept().unwrap();
                let mut request = [0; 1024];
                let _ = stream.read(&mut request).unwrap();
                stream.write_all(answer.as_bytes()).unwrap();
            }
        });
        (dir, Client::new(&socket))
    }

    #[test]
    fn nobody_listens() {
        let dir = tempfile::tempdir().unwrap();
        let client = Client::new(&dir.path().join("agent.sock"));
        assert!(matches!(
            client.get_text("/version"),
            Err(Error::NotRunning { .. })
        ));
        // A socket that its agent left behind does not count as a listener either.
        drop(UnixListener::bind(dir.path().join("agent.sock")).unwrap());
        assert!(matches!(
            client.get_text("/version"),
            Err(Error::NotRunning { .. })
        ));
    }

    #[test]
    fn pages_are_joined() {
        let (_dir, client) = server(&[
            "HTTP/1.0 200 OK\r\n\r\n{\"items\":[1,2],\"next\":\"2\"}",
            "HTTP/1.0 200 OK\r\n\r\n{\"items\":[3]}",
        ]);
        assert_eq!(client.list::<u32>("/numbers").unwrap(), [1, 2, 3]);
    }

    #[test]
    fn failures_and_strangers_are_errors() {
        let (_dir, client) = server(&[
            "HTTP/1.0 404 Not Found\r\n\r\nno such page",
            "SSH-2.0-OpenSSH\r\n",
            "HTTP/1.0 200 OK\r\n\r\n<html>",
        ]);
        let errors: Vec<String> = (0..3)
            .map(|_| client.get::<u32>("/x").unwrap_err().to_string())
            .collect();
        assert!(errors[0].contains("404 no such page"), "{}", errors[0]);
        assert!(errors[1].contains("not HTTP"), "{}", errors[1]);
        assert!(errors[2].contains("same version"), "{}", errors[2]);
    }
}
